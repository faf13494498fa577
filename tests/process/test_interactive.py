"""Ways in which people start Python: each gives the losses of one process, and leaves none."""

from __future__ import annotations

import re

import pytest
from user_script import SCRIPTS, UserScript

pytestmark = pytest.mark.rotating  # one more way to start Python each

SCRIPT = "main_in_a_function.py"


def losses(out: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss ([\d.]+)", out)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    with UserScript(SCRIPT, cwd=tmp_path_factory.mktemp("reference")) as script:
        found = losses(script.succeed())
    assert len(found) == 3
    return found


@pytest.mark.parametrize(
    "arguments, text",
    [
        pytest.param([SCRIPT, "--ap=2"], "", id="python file"),
        pytest.param(["-m", "main_in_a_function", "--ap=1"], "", id="python -m"),
        pytest.param(["-m", "IPython", "--no-banner", str(SCRIPTS / SCRIPT), "--", "--ap=1"], "", id="ipython file"),
        pytest.param(
            ["-m", "IPython", "--no-banner", "--simple-prompt", "-c", f"%run {SCRIPTS / SCRIPT} --ap=1"], "", id="%run"
        ),
    ],
)
def test_a_guarded_main_whose_loader_spawns(tmp_path, expected, arguments, text):
    if "IPython" in arguments:
        pytest.importorskip("IPython")
    home = {"PYTHONPATH": _with_scripts(), "IPYTHONDIR": str(tmp_path / "ipython"), "MPLBACKEND": "agg"}
    with UserScript(*arguments, cwd=tmp_path, text=text, **home) as script:
        assert losses(script.succeed()) == pytest.approx(expected, rel=1e-4), script.out


def _with_scripts() -> str:
    import os

    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(SCRIPTS)]))


TYPED = """
import torch
from torch import nn
_ = torch.manual_seed(0)
model = nn.Linear(4, 1)
expected = model(torch.ones(4, 4)).sum().item()
torch.moreh.option.enable_advanced_parallelization(devices=2, mixed_precision=False)
model = model.cuda()
abs(model(torch.ones(4, 4).cuda()).sum().item() - expected) < 1e-5
1 / 0
torch.moreh.option.enable_advanced_parallelization(devices=2, mixed_precision=False)
class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
    def forward(self, x):
        return 2 * self.inner(x)

second = Double().cuda()
tuple(second(torch.ones(4, 2).cuda()).shape)
model(torch.ones(4, 5).cuda())
abs(model(torch.ones(4, 4).cuda()).sum().item() - expected) < 1e-5
"""


def test_lines_typed_at_the_prompt(tmp_path):
    with UserScript("-i", cwd=tmp_path, text=TYPED) as script:
        out = script.succeed()
    answers = [line for line in out.splitlines() if not line.startswith("[info]")]
    assert answers == ["True", "(4, 2)", "True"], out + script.err
    assert "ZeroDivisionError" in script.err and "RuntimeError: mat1 and mat2 shapes" in script.err
