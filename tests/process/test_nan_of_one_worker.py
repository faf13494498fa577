"""A worker that computes a loss that is not finite, alone: the log names it, once."""

from __future__ import annotations

import pytest
from rotating import rotating_from
from user_script import UserScript

WRONG_DEVICE = """
import sys
from pathlib import Path

import torch
from torch import nn

FLAG = Path(__file__).with_name("wrong")
plan, where = sys.argv[1:]
torch.moreh.option.enable_advanced_parallelization(plan=plan)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        out = self.layer(x)
        name = Path("/proc/self/comm").read_text().strip() if FLAG.exists() else ""
        if name.startswith("moreh-worker") and where in ("all", name):
            out = out * float("nan")
        return out.square().mean()


model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    if step == 2:
        FLAG.touch()
    loss = model(torch.ones(8, 4).cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
"""


@pytest.mark.parametrize(
    "plan, where, said", rotating_from(1, [("replicate=2", "moreh-worker-1", 1), ("shard=2", "all", 0)])
)
def test_the_worker_is_named_whose_part_of_a_loss_alone_is_nan(tmp_path, plan, where, said):
    (tmp_path / "wrong_device.py").write_text(WRONG_DEVICE)
    with UserScript("wrong_device.py", plan, where, cwd=tmp_path) as script:
        out = script.succeed()
    assert "\n1 0." in out and "\n4 nan\n" in out
    assert out.count("[warning] a loss is not finite, and of its parts only that of worker 1: ") == said
    assert out.count("a loss is not finite") == said
