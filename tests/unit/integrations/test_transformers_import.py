"""The import hook, with a made-up transformers in place of the real one."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from moreh_ap import import_hook
from moreh_ap.integrations import transformers_import
from moreh_ap.integrations.adamw import AdamW


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Returns a function that puts a transformers with this source first on the path."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    others = [finder for finder in sys.meta_path if not isinstance(finder, import_hook._AfterImport)]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.syspath_prepend(tmp_path)

    def write(source):
        package = tmp_path / "transformers"
        package.mkdir()
        (package / "__init__.py").write_text(source)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("transformers", None)


def test_name_is_added_after_the_import(fake):
    fake("__all__ = ['Other']\nOther = 1\n")
    transformers_import.install()
    import transformers

    assert transformers.AdamW is AdamW
    assert "exec_module" not in vars(transformers.__loader__)


def test_name_is_added_to_what_is_imported_already(fake):
    fake("")
    import transformers

    transformers_import.install()
    assert transformers.AdamW is AdamW


def test_replaced_module_gets_the_name(fake):
    fake("import sys, types\nnew = types.ModuleType(__name__)\nnew.lazy = True\nsys.modules[__name__] = new\n")
    transformers_import.install()
    import transformers

    assert transformers.lazy
    assert transformers.AdamW is AdamW


@pytest.mark.parametrize(
    "source", ["class AdamW: pass\n", "__all__ = ['AdamW']\n__getattr__ = lambda name: 'its own'\n"]
)
def test_own_class_is_left_alone(fake, source):
    fake(source)
    transformers_import.install()
    import transformers

    assert transformers.AdamW is not AdamW


def test_failing_import_fails_as_before_and_can_be_repeated(fake, tmp_path):
    fake("raise RuntimeError('broken library')\n")
    transformers_import.install()
    with pytest.raises(RuntimeError, match="broken library"):
        importlib.import_module("transformers")
    (tmp_path / "transformers/__init__.py").write_text("repaired = 'yes, it is now'\n")
    importlib.invalidate_caches()
    transformers = importlib.import_module("transformers")
    assert transformers.repaired
    assert transformers.AdamW is AdamW


def test_looking_for_the_library_does_not_use_up_the_hook(fake):
    fake("")
    transformers_import.install()
    assert importlib.util.find_spec("transformers") is not None
    import transformers

    assert transformers.AdamW is AdamW


def test_absent_library_stays_absent_and_the_hook_waits(fake, monkeypatch):
    transformers_import.install()
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformers")
    assert any(isinstance(finder, import_hook._AfterImport) for finder in sys.meta_path)


LAZY = """
import sys, types

class Lazy(types.ModuleType):
    __all__ = ["Other"]
    def __getattr__(self, name):
        if name == "Other":
            return "looked up"
        raise AttributeError(name)

def replace():
    sys.modules["transformers"] = Lazy("transformers")

replace()
sys.modules["transformers"].replace = replace
"""


def test_name_survives_when_the_library_replaces_its_module(fake):
    fake(LAZY)
    transformers_import.install()
    import transformers as first

    first.replace()
    import transformers as second

    assert second is not first
    assert first.AdamW is second.AdamW is AdamW
    assert second.Other == "looked up"
    assert not hasattr(second, "Another")
    assert not hasattr(type(second)("transformers.models"), "AdamW")


@pytest.mark.parametrize("source", ["", LAZY])
def test_install_twice_and_undo(fake, source):
    fake(source)
    before = list(sys.meta_path)
    undo = transformers_import.install()
    transformers_import.install()
    import transformers

    assert transformers.AdamW is AdamW
    assert sys.meta_path == before
    transformers_import.install()
    undo()
    assert not hasattr(transformers, "AdamW")


def test_undone_before_the_import(fake):
    fake("")
    before = list(sys.meta_path)
    undo = transformers_import.install()
    assert len(sys.meta_path) == len(before) + 1
    undo()
    assert sys.meta_path == before
    import transformers

    assert not hasattr(transformers, "AdamW")
