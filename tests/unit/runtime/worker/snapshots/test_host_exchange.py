"""Who sends which copy to whom when workers take over on other hosts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from moreh_ap.runtime.worker.snapshots import host_exchange
from moreh_ap.runtime.worker.snapshots.host_exchange import Passed, fetch, fetch_all, pass_on


@pytest.fixture
def passed(monkeypatch):
    """Returns what was passed, as (copy of, from, to), for a number of workers whose hosts have some copies."""

    def make(found):
        made = []
        monkeypatch.setattr(host_exchange, "get_world_size", lambda: len(found))
        monkeypatch.setattr(host_exchange, "_found", lambda part_of, number, num_workers: found)
        monkeypatch.setattr(host_exchange, "_pass", lambda part_of, number, *who: made.append(who))
        monkeypatch.setattr(host_exchange, "all_agree", lambda is_fine: made.append("all"))
        return made

    return make


def test_each_worker_gets_its_copy_from_a_host_that_has_it_and_the_next_host_too(passed):
    made = passed([[0, 1, 2, 3], [0, 1, 2, 3], [], []])
    fetch(None, 2, 7)
    assert made == [(0, 0, 2), (1, 0, 3), (2, 0, 2), (3, 0, 3)]
    made = passed([[0, 2], [0, 1], [1, 2]])
    fetch(None, 1, 7)
    assert made == [], "nothing is written that is there"


def test_under_another_plan_each_host_gets_the_copies_of_all(passed):
    made = passed([[0, 1], [0, 1], [], []])
    fetch_all(None, 2, 7, 2)
    assert made == [(0, 0, 2), (1, 0, 3), "all"], "by two workers of the host that lacks them"
    made = passed([[0, 1, 2], [2, 3, 0], [3]])
    fetch_all(None, 1, 7, 4)
    assert made == [(0, 0, 2), (1, 0, 1), (1, 0, 2), (2, 0, 2), (3, 1, 0), "all"]


def test_a_copy_that_no_host_has_is_an_error(passed):
    passed([[0], [0]])
    with pytest.raises(ValueError, match="no host has copy 7 of worker 1"):
        fetch_all(None, 1, 7, 2)


@pytest.mark.parametrize("most_s, slow_s, sent", [(math.inf, 9.0, True), (1.0, 0.1, True), (1.0, 0.6, False)])
def test_a_copy_that_takes_too_long_to_the_next_host_is_not_sent(monkeypatch, most_s, slow_s, sent):
    """A piece takes `slow_s`, and the copy has two of them."""
    asked, values = [], [torch.zeros(2 * host_exchange._PIECE_BYTES, dtype=torch.uint8)]
    slot = SimpleNamespace(read=lambda number: (b"", values), begin=lambda *what: [], end=asked.append)
    for name, instead in {
        "get_rank": lambda: 0,
        "get_world_size": lambda: 2,
        "for_next_host": lambda description, memory: (description, memory),
        "all_agree": lambda is_fine: is_fine,
        "_seconds_of_a_piece": lambda per_host: slow_s,
        "_sent_head": lambda *what: [],
        "_received_head": lambda source: (b"", []),
        "_sent": lambda *what: [],
        "_receive": lambda *what: None,
    }.items():
        monkeypatch.setattr(host_exchange, name, instead)
    passed = pass_on(lambda rank: slot, 1, 7, most_s)
    assert passed == (Passed() if sent else Passed(needed_s=2 * slow_s)) and asked == ([7] if sent else [])
