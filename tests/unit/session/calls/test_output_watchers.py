"""Which outputs are watched, in which order watchers are told, and when the workers need not be asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import moreh_ap.device.function_mode  # noqa: F401  (gives tensors of the accelerator their functions)
from moreh_ap.protocol.messages.calls import ReadOutputGradient
from moreh_ap.protocol.messages.tensors import LeafReply
from moreh_ap.session.calls.output_watchers import OutputWatchers, read_gradients, watch_output


def leaf(kind="rows", differentiable=True):
    return SimpleNamespace(kind=kind, differentiable=differentiable)


def call(*leaves):
    watchers = OutputWatchers()
    structure = SimpleNamespace(leaves=leaves)
    return SimpleNamespace(structure=structure, watchers=watchers, watch=watchers.add)


def test_the_latest_watcher_is_told_first_and_one_that_is_removed_no_more():
    watchers, told = OutputWatchers(), []
    first = watchers.add([2, 0], lambda found: told.append(("first", found)))
    with watchers.add([1], lambda found: told.append(("second", found))):
        assert watchers.indices() == (0, 1, 2)
        watchers.tell({0: 1.0})
    assert told == [("second", {0: 1.0}), ("first", {0: 1.0})]
    assert watchers.indices() == (0, 2)
    first.remove()
    first.remove()
    watchers.tell({0: 1.0})
    assert len(told) == 2 and watchers.indices() == ()


def test_full_gradients_are_wanted_where_one_watcher_does_not_add_up():
    watchers = OutputWatchers()
    assert not watchers.want_full_gradients()
    watchers.add([0], print, adds_up=True)
    assert not watchers.want_full_gradients()
    watchers.add([0], print)
    assert watchers.want_full_gradients()


def test_an_output_is_counted_among_the_tensors():
    asked, told = call(leaf(), leaf("const", False), leaf(), leaf()), []
    assert watch_output(asked, 1, told.append) is not None
    assert asked.watchers.indices() == (2,)
    asked.watchers.tell({0: "another"})
    asked.watchers.tell({2: "gradient"})
    assert told == ["gradient"]


@pytest.mark.parametrize("others", [[], [leaf("const", False)], [leaf("rows", False)]])
def test_an_output_on_which_nothing_else_depends_needs_no_worker(others):
    asked = call(leaf(), *others)
    assert watch_output(asked, 0, print) is None
    assert asked.watchers.indices() == ()


def test_gradients_are_those_of_the_workers_that_have_any():
    def part(*values):
        tensor = torch.tensor(values)
        return LeafReply("rows", tuple(tensor.shape), tensor.dtype, False, tensor.numpy().tobytes())

    answers = {0: [part(1.0, 2.0), None, part(3.0)], 3: [None, None, None]}
    told = []

    def submit(command):
        told.append(command)
        return SimpleNamespace(result=lambda: answers[command.index])

    found = read_gradients(SimpleNamespace(submit=submit), 7, (0, 3))
    assert told == [ReadOutputGradient(7, 0), ReadOutputGradient(7, 3)]
    assert list(found) == [0] and found[0].is_cuda and found[0].tolist() == [1.0, 2.0, 3.0]
