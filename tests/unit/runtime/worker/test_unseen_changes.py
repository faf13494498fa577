"""What the script is warned of since it happens in the workers alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from moreh_ap.errors import UnsupportedError
from moreh_ap.protocol.module_attributes import Attributes
from moreh_ap.protocol.script_code.written_files import WRITTEN
from moreh_ap.runtime.worker.unseen_changes import UnseenChanges


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.nfe, self.last = 0, torch.ones(1)


def test_numbers_that_change_in_a_backward_are_named():
    net = Net()
    unseen = UnseenChanges(Net, Attributes(net))
    with unseen.looking_at_backward("kind"):
        net.last = torch.zeros(1)
    assert unseen.warnings == [] and unseen.known == {"kind"}
    with unseen.looking_at_backward("other"):
        net.nfe += 1
    assert "forward() of Net changes nfe when it runs in a backward" in unseen.warnings[0]
    with UnseenChanges(Net, None).looking_at_backward("kind"):
        net.nfe += 1


def test_files_are_named():
    unseen = UnseenChanges(Net, None)
    WRITTEN.clear()  # a worker that another test made in this process notes what later tests write
    WRITTEN["/data/scores.txt"] = None
    unseen.note_effects()
    assert "forward() of Net writes /data/scores.txt in every worker" in unseen.warnings[0] and not WRITTEN


@pytest.mark.parametrize("draw", [lambda: torch.rand(2), random.random])
def test_random_numbers_in_a_backward_are_refused_unless_a_forward_runs_there(draw):
    unseen = UnseenChanges(Net, None)
    with unseen.looking_at_backward("later", may_draw=True):
        draw()
    with (
        pytest.raises(UnsupportedError, match=r"backward through forward\(\) of Net draws"),
        unseen.looking_at_backward("kind"),
    ):
        draw()
