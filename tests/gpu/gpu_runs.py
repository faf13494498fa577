"""Processes in which the cases run, and which of them this machine can have."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_cases import PLACES

_SCRIPT = Path(__file__).with_name("gpu_cases.py")
_TIMEOUT_S = 270.0  # a test may wait for two of them, and has 600 s; machines that test have other things to do, too
Results = Callable[[str], dict[str, dict[str, Any]]]


@functools.cache
def num_gpus() -> int:
    """How many GPUs this machine has, asked for in a process of its own: the tests' process sees none."""
    words = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", words], env=_environment("cuda", 1), capture_output=True, text=True)
    return int(done.stdout.split()[-1]) if done.returncode == 0 else 0


def _environment(device: str, share: int) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOREH_AP_TEST_")}
    visible = os.environ.get("MOREH_TEST_VISIBLE_DEVICES", "all")
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MOREH_AP_TEST_WORKERS_PER_GPU": str(share)}
    environment["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else visible
    if device == "cuda" and visible == "all":
        del environment["CUDA_VISIBLE_DEVICES"]
    return environment


def why_not(place: str) -> str:
    """Returns why a place cannot be had here; empty if it can."""
    workers, gpus = PLACES[place][0], num_gpus()
    if not place.startswith("shared") and gpus < workers:
        if gpus == 0 and workers == 1:
            return ""  # a CPU worker stands in
        return f"needs {workers} GPUs, there {'is' if gpus == 1 else 'are'} {gpus}"
    if place == "shared by four" and gpus == 0 and os.environ.get("MOREH_CI_PART", "1") != "1":
        return "four CPU workers stand in on one day of eight"
    return ""


@functools.cache
def results_of(place: str, folder: Path, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What the named cases of a place gave; "" has the output of their process, which runs once, in `folder`."""
    device = "cuda" if num_gpus() else "cpu"
    share = PLACES[place][0] if place.startswith("shared") and num_gpus() else 1
    command = [sys.executable, str(_SCRIPT), device, place, *names]
    try:
        done = subprocess.run(
            command, env=_environment(device, share), capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=folder
        )
        out, err = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        out, err = (text.decode() if isinstance(text, bytes) else text or "" for text in (late.stdout, late.stderr))
        err += f"\nstill running after {_TIMEOUT_S:g} s"
    found = [json.loads(line) for line in out.splitlines() if line.startswith('{"case"')]
    return {"": {"output": f"{out}\n{err}"[-4000:]}, **{one["case"]: one for one in found}}
