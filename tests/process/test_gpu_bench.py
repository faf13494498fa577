"""The bench for GPUs works where there is none: every way that it compares, with a model of a few thousand weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
from bench_gpu import NO_GPU  # noqa: E402
from bench_gpu_ways import WAYS  # noqa: E402


@pytest.mark.rotating
@pytest.mark.parametrize("way", WAYS)
def test_a_way_runs_where_there_is_no_gpu(way, tmp_path):
    command = [sys.executable, str(SCRIPTS / "bench_gpu.py"), "--size", "toy", "--ways", way, "--json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command.append(str(tmp_path / "found.json"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert NO_GPU in done.stdout
    ((found,),) = json.loads((tmp_path / "found.json").read_text()).values()
    assert found["losses"][-1] < found["losses"][0] and found["step_s"] > 0.0
