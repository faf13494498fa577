"""The scripts of `tutorials/manual` train what the script for one device trains, each started as its page says."""

from __future__ import annotations

import json
import runpy
import shlex
import socket
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from user_script import UserScript

pytestmark = pytest.mark.rotating  # one more hand-written script each

ROOT = Path(__file__).parents[2]
MANUAL = ROOT / "tutorials" / "manual"
# AdamW divides gradients by their own size, and so does clipping: losses would not show gradients that are twice as
# large as they should be. The norm does, and so does AdamW with an epsilon of about the gradients' size.
SIZES = {"layers": 4, "hidden": 128, "vocabulary": 256, "batch-size": 8, "block-size": 16, "steps": 5, "seed": 3,
         "lr": 1e-2, "epsilon": 1e-2, "max-norm": 2.5}  # fmt: skip
FLAGS = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]


SHOWN = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "manual_counterparts.py")))
COMMANDS = {
    f"{counterpart.name}{' on two nodes' if len(lines) > 1 else ''}": lines
    for counterpart in SHOWN.COUNTERPARTS
    for lines in counterpart.commands
}
VARIANTS = {  # processes: flags that no shown command has
    2: [
        ("train_ddp.py", "--micro-batches", "2"),
        ("train_tp.py", "--sequence-parallel", "--no-loss-parallel", "--micro-batches", "2"),
        ("train_pp.py", "--schedule", "gpipe", "--micro-batches", "4", "--split", "1+3"),
        ("train_pp.py", "--schedule", "interleaved", "--micro-batches", "4"),
    ],
    4: [
        ("train_fsdp.py", "--replicate", "2", "--micro-batches", "2"),
        ("train_3d.py", "--tensor", "1", "--replicate", "2", "--pipeline", "2"),
    ],
}


class Result:
    """What a run has written."""

    def __init__(self, folder: Path, name: str) -> None:
        self.report, self.weights = folder / f"{name}.json", folder / f"{name}.pt"
        self.flags = [*FLAGS, "--json", str(self.report), "--save", str(self.weights)]

    def is_that_of(self, other: Result) -> None:
        """Fails if losses, norms or saved weights are not the other's."""
        report, expected = json.loads(self.report.read_text()), json.loads(other.report.read_text())
        assert report["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert report["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert len(report["step_s"]) == SIZES["steps"] and min(report["step_s"]) > 0
        weights, right = torch.load(self.weights), torch.load(other.weights)
        assert weights.keys() == right.keys()
        for name, tensor in weights.items():
            assert (tensor - right[name]).abs().max() <= 1e-4 * right[name].abs().max(), name


def words_of(command: str) -> list[str]:
    """Returns what follows `python` in a shown command."""
    program, *words = shlex.split(command)
    start = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[program]
    return [*start, *(str(ROOT / word) if word.startswith(SHOWN.FOLDER) else word for word in words)]


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def steps_in(output: str) -> int:
    return sum(line.startswith("step ") for line in output.splitlines())


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Result:
    """The script for one device."""
    folder = tmp_path_factory.mktemp("alone")
    result = Result(folder, "alone")
    with UserScript(*words_of(SHOWN.SINGLE_COMMAND), *result.flags, "--micro-batches", "2", cwd=folder) as script:
        assert steps_in(script.succeed()) == SIZES["steps"]
    norms = json.loads(result.report.read_text())["norms"]
    assert min(norms) < SIZES["max-norm"] < max(norms), "some steps are clipped and some are not"
    return result


@pytest.mark.parametrize("name", COMMANDS)
def test_a_shown_command_trains_what_one_device_trains(name, alone, tmp_path):
    if name == "deepspeed":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed with this project: pip install deepspeed")
    results = [Result(tmp_path, f"node{number}") for number in range(len(COMMANDS[name]))]
    port, started = str(free_port()), []
    with ExitStack() as scripts:
        for command, result in zip(COMMANDS[name], results):
            words = [word.replace("29400", port) for word in words_of(command)]
            started.append(scripts.enter_context(UserScript(*words, *result.flags, cwd=tmp_path)))
        output = "".join(script.succeed() for script in started)
    assert steps_in(output) == SIZES["steps"], "one process prints, once a step"
    written = [result for result in results if result.report.exists()]
    assert len(written) == 1, "one process saves"
    written[0].is_that_of(alone)


def test_the_one_line_trains_what_one_device_trains(alone, tmp_path):
    result = Result(tmp_path, "one_line")
    with UserScript(*words_of(SHOWN.ONE_LINE_COMMAND), *result.flags, cwd=tmp_path) as script:
        script.succeed()
    result.is_that_of(alone)


@pytest.mark.parametrize("num_processes", VARIANTS)
def test_other_flags_train_what_one_device_trains(num_processes, alone, tmp_path):
    results = [Result(tmp_path, str(number)) for number in range(len(VARIANTS[num_processes]))]
    runs = [
        (free_port(), [str(MANUAL / script), *result.flags, *flags])
        for (script, *flags), result in zip(VARIANTS[num_processes], results)
    ]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    words = words_of(f"{SHOWN.TORCHRUN} {num_processes} manual_in_turn.py {tmp_path / 'runs.json'}")
    with UserScript(*words, cwd=tmp_path) as script:
        script.succeed()
    for result in results:
        result.is_that_of(alone)


def test_a_batch_that_cannot_be_cut_evenly_is_refused(tmp_path):
    words = [MANUAL / "train_ddp.py", "--batch-size", "6", "--micro-batches", "2"]
    with UserScript(*words, cwd=tmp_path, RANK="0", WORLD_SIZE="2") as script:  # refused before processes meet
        assert script.wait() == 2
        assert "--batch-size is 6; it must be a multiple of 2 devices that share the batch x 2 micro" in script.err


def test_a_script_for_several_processes_says_how_torchrun_starts_it(tmp_path):
    with UserScript(MANUAL / "train_tp.py", "--steps", "1", cwd=tmp_path) as script:
        assert script.wait() == 2
        assert "start it with torchrun: torchrun --standalone --nproc-per-node 2 " in script.err
