"""`make wheel`: the file has all that a script, its workers and the programs need."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.rotating

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
torch.moreh.option.enable_advanced_parallelization(plan="replicate=2")
import moreh_ap
print(moreh_ap.__file__)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.ones(4, 8).cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"{loss.item():.6f}")
"""
ALONE = SCRIPT.replace('torch.moreh.option.enable_advanced_parallelization(plan="replicate=2")', "").replace(
    ".cuda()", ""
)


def run(*command: object, cwd: Path) -> str:
    """Returns what a command prints, which finds no other copy of the package."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_trains_in_an_environment_of_its_own(tmp_path):
    run("make", "wheel", f"PY={sys.executable}", f"DIST={tmp_path / 'dist'}", cwd=ROOT)
    (wheel,) = (tmp_path / "dist").glob("moreh_ap-*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    # What the package depends on is not fetched again; the environment's own packages come first.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet", wheel, cwd=tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "alone.py").write_text(ALONE)
    said = run(python, "train.py", cwd=tmp_path).splitlines()
    assert str(packages / "moreh_ap" / "__init__.py") in said
    assert said[-1] == run(python, "alone.py", cwd=tmp_path).splitlines()[-1]
    programs = tmp_path / "env" / "bin"
    assert 'plan="' in run(programs / "moreh-ap", "plan", "Llama3-8B", "--devices", "8xH100", cwd=tmp_path)
    assert run(programs / "moreh-smi", "--help", cwd=tmp_path)
