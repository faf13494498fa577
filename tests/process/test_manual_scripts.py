"""The hand-written scripts of `tutorials/manual` give the losses of one process, each as torchrun starts it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

MANUAL = Path(__file__).parents[2] / "tutorials" / "manual"
# AdamW divides gradients by their own size, so one that is twice as large as it should be would not be noticed; with an
# epsilon of about that size it is.
SIZES = {"layers": 4, "hidden": 128, "vocabulary": 256, "batch_size": 8, "block_size": 16, "steps": 5, "seed": 3,
         "lr": 1e-2, "epsilon": 1e-2}  # fmt: skip
FLAGS = [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of one process that knows nothing of parallelism."""
    spec = importlib.util.spec_from_file_location("manual_common", MANUAL / "common.py")
    common = importlib.util.module_from_spec(spec)
    sys.modules["manual_common"] = common  # dataclasses look their module up
    spec.loader.exec_module(common)
    args = Namespace(**SIZES)
    model = common.build_model(args)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=args.epsilon)
    losses = []
    for batch in common.make_batches(args):
        loss = model(batch, labels=batch).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def start(script: str, num_processes: int, flags: list[str], folder: Path) -> tuple[int, str]:
    """Returns (exit status, output) of a script under torchrun, which ends its processes when it is ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes),
               str(MANUAL / script), *FLAGS, *flags]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=45)  # torchrun gives its processes 30 s
    return process.returncode, output


@pytest.mark.parametrize(
    "script, num_processes, flags",
    [
        ("train_ddp.py", 2, ["--micro-batches", "2"]),
        ("train_fsdp.py", 4, ["--replicate", "2", "--micro-batches", "2"]),
        ("train_tp.py", 2, ["--micro-batches", "2"]),
        ("train_tp.py", 2, ["--sequence-parallel", "--no-loss-parallel"]),
        ("train_pp.py", 2, ["--schedule", "gpipe", "--micro-batches", "4", "--split", "1+3"]),
        ("train_pp.py", 2, ["--schedule", "1f1b"]),
        ("train_pp.py", 2, ["--schedule", "interleaved", "--micro-batches", "4"]),
        ("train_3d.py", 8, []),
        ("train_3d.py", 4, ["--tensor", "1", "--replicate", "2", "--pipeline", "2"]),
    ],
)
def test_losses_are_those_of_one_process(script, num_processes, flags, expected, tmp_path):
    status, output = start(script, num_processes, [*flags, "--json", str(tmp_path / "report.json")], tmp_path)
    assert status == 0, output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["losses"] == pytest.approx(expected, rel=1e-5)
    assert len(report["step_s"]) == SIZES["steps"] and min(report["step_s"]) > 0
    printed = [line for line in output.splitlines() if line.startswith("step ")]
    assert len(printed) == SIZES["steps"], "one process prints, once a step"


def test_a_batch_that_cannot_be_cut_evenly_is_refused(tmp_path):
    status, output = start("train_ddp.py", 2, ["--batch-size", "6", "--micro-batches", "2"], tmp_path)
    assert status != 0
    assert "--batch-size is 6; it must be a multiple of 2 devices that share the batch x 2 micro-batches" in output
