"""Runs that are killed while they save, at random moments: what is in the folder loads, and is not older than promised.

``MOREH_KILLS=100`` kills so many times, as `make test-saves` does; otherwise ten.
"""

from __future__ import annotations

import os
import random
import signal
import time
import warnings

import pytest
import torch
from user_script import UserScript

import moreh_ap

pytestmark = pytest.mark.rotating  # one more plan each

KILLS = int(os.environ.get("MOREH_KILLS", "10"))
SEED = int(os.environ.get("MOREH_CI_PART", "1"))

CASES = {  # plan, background, share of the kills
    "one process": ("", "", 0.3),
    "one process, in the background": ("", "background", 0.3),
    "shard": ("shard=2", "", 0.1),
    "shard, in the background": ("shard=2", "background", 0.1),
    "replicate, in the background": ("replicate=2", "background", 0.2),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_no_kill_leaves_a_bad_checkpoint(tmp_path, case):
    """Runs save as fast as they can and are killed; the next run goes on from what it finds."""
    plan, background, share = CASES[case]
    folder, moments = tmp_path / "saved", random.Random(SEED)
    returned, during_saves = 0, 0
    for _ in range(max(1, round(KILLS * share))):
        with UserScript("saves_until_killed.py", folder, plan, background, cwd=tmp_path) as script:
            # A save in the background is complete once the next one has returned.
            script.wait_for_output(f"\n{returned + 1 + bool(background)}\n")
            time.sleep(moments.uniform(0, 0.2))
            script.process.send_signal(signal.SIGKILL)
            script.wait()
            returned = int([line for line in script.out.splitlines() if line.isdecimal()][-1])  # not the log's
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing that was written may be damaged
            model = torch.nn.Linear(64, 64, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
            step = moreh_ap.load(folder, model=model, optimizer=optimizer)["step"]
        assert step >= returned - bool(background), "a save had returned; the last one may have been under way"
        assert torch.equal(model.weight, torch.full((64, 64), float(step)))
        momentum = optimizer.state[model.weight]["momentum_buffer"]
        torch.testing.assert_close(momentum, torch.full((64, 64), -2 + 2 * 0.5**step), rtol=1e-6, atol=0)
        during_saves += any("safetensors" in name for name in _unnamed(folder))
        returned = step
    assert during_saves or KILLS < 100, "none of the runs was killed while it saved"


def _unnamed(folder):
    """Files in a folder that no description names: a save was interrupted."""
    text = "".join(path.read_text() for path in folder.glob("checkpoint*.json"))
    return [path.name for path in folder.iterdir() if ".safetensors" in path.name and path.name not in text]
