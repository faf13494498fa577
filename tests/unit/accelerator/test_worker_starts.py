"""Workers that begin before the session is there: which are taken, and what becomes of those that are not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moreh_ap.accelerator import enabling, redirection, worker_starts
from moreh_ap.accelerator.worker_starts import WorkerStarts
from moreh_ap.settings import Options


class Group:
    """Workers that do nothing."""

    def __init__(self, num_workers: int, **arguments: object) -> None:
        self.num_workers, self.arguments, self.is_closed = num_workers, arguments, False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def made(monkeypatch):
    """The groups that were made, of workers that do nothing."""
    groups: list[Group] = []

    def make(*arguments, **others):
        groups.append(Group(*arguments, **others))
        return groups[-1]

    monkeypatch.setattr(worker_starts, "WorkerGroup", make)
    monkeypatch.setattr(worker_starts, "RecoveringWorkerGroup", make)
    return groups


def test_workers_that_began_ahead_are_taken_once(made):
    starts = WorkerStarts(Options(devices=3))
    assert [group.num_workers for group in made] == [3]
    assert starts.start(3) is made[0] and len(made) == 1
    assert starts.start(3) is made[1], "others, for a restart"


def test_workers_whose_commands_will_be_kept_begin_ahead_too_and_get_the_rules_of_the_session_later(made):
    starts = WorkerStarts(Options(devices=2, recovery="memory"))
    starts.make_rules = lambda given: "rules" if given is starts else ""
    assert starts.start(2) is made[0] and made[0].arguments["make_rules"]() == "rules"
    assert not made[0].arguments["is_frugal"]


def test_an_accelerator_that_cannot_be_made_leaves_no_workers(made, monkeypatch):
    def refuse(self, options, starts):
        raise KeyboardInterrupt

    monkeypatch.setattr(redirection.Accelerator, "__init__", refuse)
    with pytest.raises(KeyboardInterrupt):
        enabling.make_accelerator(Options(devices=2))
    assert [group.is_closed for group in made] == [True]


def test_an_accelerator_that_fails_after_it_has_taken_its_workers_leaves_none_either(made, monkeypatch):
    def take_and_refuse(self, options, starts):
        starts.start(starts.num_used)
        raise ValueError

    monkeypatch.setattr(redirection.Accelerator, "__init__", take_and_refuse)
    with pytest.raises(ValueError):
        enabling.make_accelerator(Options(devices=2))
    assert [group.is_closed for group in made] == [True]


def test_workers_begin_before_the_session_and_the_planner_are_imported():
    code = (
        "import sys, torch; from moreh_ap.accelerator import worker_starts;"
        "print([name for name in sys.modules if name.startswith(('moreh_ap.planner', 'moreh_ap.parallelizer',"
        " 'moreh_ap.session.session', 'torch.distributed.tensor', 'sympy'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", done.stdout
