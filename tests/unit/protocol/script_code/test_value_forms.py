"""Forms of values: equal as long as the value is the same, other once it has changed."""

from __future__ import annotations

import argparse
import collections
import importlib
import threading
import time
import types

import numpy as np
import pytest
import torch
from torch import nn

from moreh_ap.protocol.script_code.value_forms import (
    PickledForm,
    Same,
    form_of,
    is_alike,
    is_of_script,
    is_stable,
    tensors_in,
)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, 2),
        (1, True),
        ("a", "b"),
        ([1, [2]], [1, [3]]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1}),
        (argparse.Namespace(a=1), argparse.Namespace(a=2)),
        (types.SimpleNamespace(a=(1,)), types.SimpleNamespace(a=(2,))),
        (torch.float32, torch.float64),
        (list(range(1000)), list(range(1001))),
        (collections.deque([1]), collections.deque([2])),
        (np.zeros(3), np.ones(3)),
        (open, print),
        (torch.ones(1), torch.ones(1)),
        ([torch.ones(1)], [torch.ones(1)]),
        (nn.Linear(1, 1), nn.Linear(1, 1)),
    ],
)
def test_a_form_is_equal_as_long_as_the_value_is(value, other):
    assert form_of(value) == form_of(value) is not None
    assert form_of(value) != form_of(other)


class Kept(collections.UserList):
    lock = None


@pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(2)], np.zeros(2), Kept([0, 0]), [*range(200)]])
def test_a_change_in_place_is_another_form(value):
    before = form_of(value)
    (value[0] if isinstance(value[0], torch.Tensor) and value[0].ndim else value)[0] = 7
    assert form_of(value) != before


def test_tensors_in_objects_are_compared_by_version():
    held = collections.deque([torch.ones(2)])
    before = form_of(held)
    held[0].add_(1)
    assert form_of(held) != before and is_stable(held, form_of(held))


def test_what_cannot_be_pickled_is_compared_by_identity():
    held = Kept([1])
    held.lock = threading.Lock()
    before = form_of(held)
    assert isinstance(before, PickledForm) and not before.is_whole and form_of(held) == before
    held.append(2)
    assert form_of(held) != before


def test_an_object_with_another_pickle_each_time_is_not_stable():
    class Clock:
        def __reduce__(self):
            return float, (time.perf_counter(),)

    clock = collections.deque([Clock()])
    assert not is_stable(clock, form_of(clock))


def test_identity_keeps_no_object_alive_and_is_not_that_of_a_later_one():
    marks = set()
    for _ in range(10):
        marks.add(form_of(torch.ones(2)))
    assert len(marks) == 10
    assert Same(nn.Linear) == Same(nn.Linear)


def test_objects_are_alike_by_their_pickle():
    assert is_alike(collections.deque([1]), collections.deque([1]))
    assert not is_alike(collections.deque([1]), collections.deque([2]))
    assert not is_alike(collections.deque([torch.ones(1)]), collections.deque([torch.ones(1)]))
    assert not is_alike(1, 1)


class Irreps(tuple):
    """As e3nn has it: how many entries it has is another question than its length."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_container_of_a_library_that_counts_otherwise_is_compared_by_its_pickle():
    assert form_of(Irreps([1, 2])) == form_of(Irreps([1, 2])) != form_of(Irreps([1, 3]))
    assert form_of((Irreps([1, 2]), 1)) is not None
    assert tensors_in(Irreps([torch.ones(1)])) == []


def test_tensors_are_found_in_small_containers():
    tensor = torch.ones(1)
    assert tensors_in({"a": [tensor, 1]}) == [tensor]
    assert tensors_in(3) == tensors_in([1] * 100) == []


def test_what_an_installer_has_put_beside_the_script_is_not_the_scripts(tmp_path, monkeypatch):
    """As `pip install --target` does."""
    for name in ("installed_package", "own_package"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    for name in ("installed_module", "own_module"):
        (tmp_path / f"{name}.py").write_text("")
    info = tmp_path / "library-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: library\nVersion: 1.0\n")
    (info / "RECORD").write_text("installed_package/__init__.py,sha256=a,0\ninstalled_module.py,sha256=a,0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("installed_package", "own_package", "installed_module", "own_module"):
        importlib.import_module(name)
        assert is_of_script(name) is name.startswith("own")
    assert not is_of_script("installed_package.part")
