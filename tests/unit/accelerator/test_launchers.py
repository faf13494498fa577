"""A script that a launcher has started several times is told to start once."""

from __future__ import annotations

import pytest

from moreh_ap.accelerator.launchers import refuse_copies
from moreh_ap.errors import UnsupportedError


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},  # torchrun --nproc_per_node=1
        {"WORLD_SIZE": "4", "RANK": "0"},  # an operator's pod: nothing says that it has copies beside it
        {"WORLD_SIZE": "", "LOCAL_RANK": "0"},
    ],
)
def test_one_process_is_what_the_line_is_for(environment):
    refuse_copies(environment)


def test_copies_of_a_launcher_are_refused_with_the_command_to_use(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/home/me/finetune.py", "--lr", "1"])
    with pytest.raises(UnsupportedError) as error:
        refuse_copies({"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3"})
    said = str(error.value).splitlines()
    assert len(said) == 4 and "8 copies" in said[0] and "LOCAL_RANK=3" in said[0]
    assert said[2] == "Try: python finetune.py"
