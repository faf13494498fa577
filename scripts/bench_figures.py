"""The figures of `make bench`: what each compares, with which settings, and which code it is about.

Decides when a figure is stale: when a file of that code is another than when the figure was measured. Must not know how
runs are made, nor how a page reads.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "benchmarks.json"
STEP = (
    "moreh_ap/device/**/*.py",
    "moreh_ap/protocol/**/*.py",
    "moreh_ap/runtime/**/*.py",
    "moreh_ap/session/*.py",
    "moreh_ap/session/calls/*.py",
    "moreh_ap/session/models/*.py",
    "moreh_ap/parallelizer/*.py",
    "moreh_ap/parallelizer/call/*.py",
    "moreh_ap/parallelizer/data/*.py",
    "moreh_ap/parallelizer/items/*.py",
    "moreh_ap/parallelizer/observation/*.py",
    "moreh_ap/parallelizer/statistics/batch_statistics.py",
    "moreh_ap/parallelizer/loss/*.py",
    "moreh_ap/parallelizer/precision/output_precision.py",
    "tutorials/manual/common.py",
    "tutorials/manual/train_one_line.py",
)
"""What every training step on workers runs through, and what the script does around it."""

START = (
    "moreh_ap/*.py",
    "moreh_ap/session/planning/*.py",
    "moreh_ap/parallelizer/state/*.py",
    "moreh_ap/parallelizer/trial/*.py",
    "moreh_ap/integrations/*.py",
)
LLAMA = ("--layers", "4", "--hidden", "384", "--steps", "8")


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: What it is selected by.
        paths: Globs of the files that it is about, below the repository.
        baseline: Of `bench_overhead.py`, "" for a figure that another script prints.
        mode: "steps", "empty" or "startup".
        flags: Further flags of `bench_overhead.py`, or the command of the other script.
        same_runs_as: The figure whose runs give this one too; "": it has runs of its own.
    """

    name: str
    paths: tuple[str, ...] = field(repr=False)
    baseline: str = ""
    mode: str = "steps"
    flags: tuple[str, ...] = ()
    same_runs_as: str = ""


def _manual(baseline: str) -> str:
    return f"tutorials/manual/train_{baseline}.py"


_PIPELINE = (*STEP, "moreh_ap/parallelizer/pipeline/*.py", _manual("pp"))
_TENSOR = (*STEP, "moreh_ap/parallelizer/tensor/*.py", _manual("tp"))
_PP_FLAGS = (*LLAMA, "--plan", "pipeline=2,micro_batches=4")
_3D_FLAGS = (
    "--layers",
    "4",
    "--hidden",
    "256",
    "--steps",
    "5",
    "--plan",
    "shard=2,tensor=2,pipeline=2,micro_batches=4",
)
FIGURES = {
    figure.name: figure
    for figure in (
        Figure("ddp", (*STEP, _manual("ddp")), "ddp", "steps", LLAMA),
        Figure("startup", (*STEP, *START, _manual("ddp")), "ddp", "startup", LLAMA, same_runs_as="ddp"),
        Figure("fsdp", (*STEP, _manual("fsdp")), "fsdp", "steps", LLAMA),
        Figure("tensor", _TENSOR, "tp", "steps", (*LLAMA, "--plan", "tensor=2")),
        Figure("pipeline", _PIPELINE, "pp", "steps", _PP_FLAGS),
        Figure("empty", (*STEP, _manual("ddp")), "ddp", "empty", ("--steps", "200")),
        Figure("3d", tuple(dict.fromkeys([*_TENSOR, *_PIPELINE, _manual("3d")])), "3d", "steps", _3D_FLAGS),
        Figure("split", (*STEP, "scripts/bench_split.py"), flags=("bench_split.py", "--rounds")),
        Figure(
            "small",
            (*STEP, "moreh_ap/session/own_process/*.py", "scripts/bench_small_models.py"),
            flags=("bench_small_models.py", "--rounds"),
        ),
        Figure(
            "hosts",
            (*STEP, "moreh_ap/hosts/*.py", "scripts/bench_two_hosts.py", _manual("ddp")),
            flags=("bench_two_hosts.py", "--pairs"),
        ),
        Figure(
            "planner",
            (*STEP, "moreh_ap/planner/**/*.py", "scripts/bench_planner.py"),
            flags=("bench_planner.py", "--devices", "2", "--rounds"),
        ),
    )
}
"""By name, in the order in which they are measured."""

USUAL = ("ddp", "startup", "fsdp", "tensor", "pipeline", "empty")
"""Those that `make bench` measures unless others are named."""


def digest(paths: tuple[str, ...], root: Path = ROOT) -> str:
    """Returns a digest of the names and contents of all files that globs match.

    Raises:
        ValueError: A glob matches no file.
    """
    found: set[Path] = set()
    for glob in paths:
        files = {path for path in root.glob(glob) if path.is_file()}
        if not files:
            raise ValueError(f"no file is called {glob}: correct the figure's paths in scripts/bench_figures.py")
        found |= files
    whole = hashlib.sha256()
    for path in sorted(found):
        whole.update(f"{path.relative_to(root).as_posix()}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16]
