"""Breaks one scaling at a time in a copy of the tree, and asks the matrix of families and plans to notice.

    python scripts/mutations.py            # all mutations; about a minute each on two cores
    python scripts/mutations.py clip norm  # some

Exits with 1 if a mutation survives, if a cell fails without one, or if a text to be changed is no longer in its file.
Must not know how a cell is computed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIME_LIMIT_S = 600
FOUND = re.compile(r"^E +AssertionError: (.* differs by .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Mutation:
    """One wrong line.

    Attributes:
        name: What to call it.
        file: The file, from the root of the tree.
        right: The text that is replaced; it must be there exactly once.
        wrong: The text in its place.
        cell: The cell of the matrix that must notice.
    """

    name: str
    file: str
    right: str
    wrong: str
    cell: str


MUTATIONS = [
    Mutation(
        "mean_of_means",
        "moreh_ap/parallelizer/loss/loss_reduction.py",
        "dist.all_reduce(numbers, group=self.axis.group)",
        "numbers *= self.axis.size",
        "replicate-llama3",
    ),
    Mutation(
        "average",
        "moreh_ap/parallelizer/data/bucketed_allreduce.py",
        "self._work = start(self._flat)",
        "self._work = start(self._flat.mul_(0.5))",
        "replicate-llama3",
    ),
    Mutation(
        "whole",
        "moreh_ap/parallelizer/call/forward.py",
        "(grad * (1.0 / call.axis.size) if counts_once else grad)",
        "grad",
        "replicate-convnet_batchnorm",
    ),
    Mutation(
        "micro_batch_means",
        "moreh_ap/parallelizer/call/followed_forwards.py",
        "dist.all_reduce(numbers, group=call.axis.group)",
        "numbers *= call.axis.size",
        "replicate_micro-nanogpt",
    ),
    Mutation("norm", "moreh_ap/parallelizer/data/norms.py", "dist.all_reduce(powered)", "pass", "shard-gpt2"),
    Mutation(
        "clip",
        "moreh_ap/runtime/worker/worker_optimizer.py",
        "command.max_norm / (norm.tensor + 1e-6)",
        "2 * command.max_norm / (norm.tensor + 1e-6)",
        "shard-gpt2",
    ),
    Mutation(
        "sequence_bias",
        "moreh_ap/parallelizer/tensor/styles.py",
        "(bias if region.sequence.length is None else region.crossing.enter(bias))",
        "bias",
        "sequence-gpt2",
    ),
    Mutation(
        "shared_heads",
        "moreh_ap/parallelizer/tensor/styles.py",
        "dist.all_reduce(summed, group=ctx.crossing.group)",
        "pass",
        "tensor4-llama3",
    ),
    Mutation(
        "vocabulary",
        "moreh_ap/parallelizer/tensor/vocabulary.py",
        "dist.all_reduce(totals, group=crossing.group)",
        "totals *= 2",
        "tensor-llama3",
    ),
    Mutation(
        "tensor_norm",
        "moreh_ap/parallelizer/state/state_shard.py",
        "in_tensor = self.position.tensor.rank == 0 if self.layout is None else self.layout.writes",
        "in_tensor = True",
        "tensor-gpt2",
    ),
    Mutation(
        "tied_stages",
        "moreh_ap/parallelizer/pipeline/stages.py",
        "dist.all_reduce(local_shard(param.grad), group=self._groups[tuple(self._shared[name])])",
        "pass",
        "pipeline-gpt2",
    ),
    Mutation(
        "pipeline_norm",
        "moreh_ap/runtime/worker/worker_model.py",
        "is_first = stages is None or stages.first_holder_of(name) == position.pipeline.rank",
        "is_first = True",
        "pipeline-gpt2",
    ),
    Mutation(
        "scaled_by_schedule",
        "moreh_ap/parallelizer/pipeline/schedules.py",
        "scale_grads=False",
        "scale_grads=True",
        "pipeline-mistral",
    ),
]


def copy_tree(target: Path) -> None:
    """Copies every file that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())


def apply(mutation: Mutation, tree: Path) -> None:
    """Puts the wrong text into the copy.

    Raises:
        SystemExit: The right text is not in the file exactly once.
    """
    file = tree / mutation.file
    text = file.read_text()
    if text.count(mutation.right) != 1:
        raise SystemExit(f"{mutation.name}: {mutation.file} has {text.count(mutation.right)} times {mutation.right!r}")
    file.write_text(text.replace(mutation.right, mutation.wrong))


def run_cells(cells: list[str], tree: Path) -> tuple[int, str]:
    """Runs cells of the matrix in the copy; exit code of pytest, and its output."""
    environment = {name: value for name, value in os.environ.items() if name != "MOREH_MATRIX_RESULTS"}
    environment |= {"PYTHONPATH": str(tree), "MOREH_MATRIX": "full", "OMP_NUM_THREADS": "1"}
    chosen = " or ".join(f"[{cell}]" for cell in cells)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/process/test_matrix.py", "-k", chosen],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(mutation.name for mutation in MUTATIONS))
    names = parser.parse_args().names
    if unknown := set(names) - {mutation.name for mutation in MUTATIONS}:
        parser.error(f"no mutation is called {', '.join(sorted(unknown))}")
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        code, output = run_cells(sorted({mutation.cell for mutation in chosen}), Path(folder))
        if code != 0:
            print(f"the cells fail without a mutation\n{output}", file=sys.stderr)
            return 1
    for mutation in chosen:
        with tempfile.TemporaryDirectory() as folder:
            copy_tree(Path(folder))
            apply(mutation, Path(folder))
            code, output = run_cells([mutation.cell], Path(folder))
        noticed = FOUND.search(output) if code == 1 else None
        survived += noticed is None
        what = f"noticed: {noticed[1]}" if noticed else f"SURVIVED (exit code {code})\n{output[-2000:]}"
        print(f"{mutation.name} in {mutation.file}, {mutation.cell}: {what}", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
