"""The registry of replacements: what it notes, and that everything is as before once it is undone."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest

from moreh_ap.patching import Patches


class Base:
    @staticmethod
    def inherited():
        """Of the base."""


class Holder(Base):
    @staticmethod
    def own():
        """Of the class."""


def new():
    """Says something else.

    And more, which is not in the table.
    """


def test_a_replacement_is_noted_and_undone():
    patches, before = Patches(), dict(vars(Holder))
    group = patches.group("a reason")
    assert group.replace(Holder, "own", new).__doc__ == "Of the class."
    group.replace(Holder, "inherited", lambda: None, "does nothing")
    noted = [(patch.target, patch.effect, patch.reason) for patch in patches]
    name = f"{__name__}.Holder"
    assert noted == [
        (f"{name}.own", "Says something else.", "a reason"),
        (f"{name}.inherited", "does nothing", "a reason"),
    ]
    patches.undo()
    assert dict(vars(Holder)) == before
    assert list(patches) == []


def test_changes_are_taken_back_last_first():
    patches, order = Patches(), []
    patches.on_undo(lambda: order.append(1))
    patches.group("").note("a.b", "something", lambda: order.append(2))
    patches.undo()
    patches.undo()
    assert order == [2, 1]


def test_a_replacement_has_to_say_what_it_does():
    with pytest.raises(TypeError, match="docstring"):
        Patches().group("").replace(Holder, "own", lambda: None)


def test_names_that_a_holder_lacks_are_left_out():
    patches, holder = Patches(), ModuleType("some")
    holder.there = 1
    patches.group("").replace_all(holder, {"there": new, "not_there": new})
    assert [patch.target for patch in patches] == ["some.there"]
    patches.undo()
    assert holder.there == 1


def test_an_entry_of_a_table_is_put_and_restored():
    patches, table = Patches(), {"old": 1}
    group = patches.group("")
    group.put(table, "old", 2, "some.table", "x")
    group.put(table, "new", 3, "some.table", "x")
    assert table == {"old": 2, "new": 3}
    patches.undo()
    assert table == {"old": 1}


def test_a_change_waits_for_the_import(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    patches = Patches()
    group = patches.group("")
    group.when_imported("imported_late", lambda module: group.replace(module, "value", 2, "is 2"))
    assert [patch.target for patch in patches] == ["sys.meta_path"]
    imported_late = importlib.import_module("imported_late")

    assert imported_late.value == 2
    patches.undo()
    assert imported_late.value == 1
    monkeypatch.delitem(sys.modules, "imported_late")


def test_a_forked_child_has_nothing_replaced():
    patches, holder = Patches(), SimpleNamespace(value=1, __name__="some")
    patches.group("").replace(holder, "value", 2, "is 2")
    child = os.fork()
    if child == 0:
        os._exit(holder.value)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert holder.value == 2
    patches.undo()


def test_a_replacement_is_pickled_by_the_name_under_which_it_is_found():
    def replacement():
        """Not what was there."""

    patches = Patches()
    patches.group("").replace(Holder, "own", replacement)
    assert pickle.loads(pickle.dumps(replacement)) is replacement
    patches.undo()
