"""Verifications that are remembered."""

from __future__ import annotations

import json
from types import SimpleNamespace

from torch import nn

from moreh_ap.local import cache_files
from moreh_ap.plan import Plan
from moreh_ap.protocol.script_code import script_globals
from moreh_ap.session.verification import verified_models
from moreh_ap.session.verification.equivalence import Equivalence
from unit.session.verification.samples import Stack


def test_what_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv(cache_files.FOLDER_VARIABLE, str(tmp_path / "deep" / "cache"))
    model, found = Stack(), Equivalence("tensor=2", "verified", loss=1e-7, norm=0.0, gradient=0.0, weight=0.0)
    key = verified_models.key_of(model, "", "x", Plan(tensor=2))
    assert verified_models.look_up(key) is None
    verified_models.keep(key, "Stack", found)
    assert verified_models.look_up(key) == found
    assert json.loads(verified_models.FILE.path.read_text())[key]["model"] == "Stack"
    key_of = verified_models.key_of
    others = {key_of(Stack(), "", "x", Plan(tensor=4)), key_of(Stack(), "", "y", Plan(tensor=2))}
    wider = Stack()
    wider.blocks.append(nn.Linear(4, 4))
    others.add(verified_models.key_of(wider, "", "x", Plan(tensor=2)))
    other = Stack()
    other.p_drop = 0.25  # what a forward does may depend on an attribute
    others.add(verified_models.key_of(other, "", "x", Plan(tensor=2)))
    assert len(others) == 4 and key not in others
    assert verified_models.key_of(Stack(), "", "x", Plan(tensor=2)) == key
    verified_models.FILE.path.write_text("[1")
    assert verified_models.look_up(key) is None
    verified_models.keep(key, "Stack", found)
    assert verified_models.look_up(key) == found


SCALE = {"of": ("the", "script")}


def scaled(x):
    return x * len(SCALE)


class Calling(nn.Module):
    """Calls a function of the script, which reads a global variable."""

    def __init__(self, settings):
        super().__init__()
        self.settings = settings

    def forward(self, x):
        return scaled(x)


def test_a_model_is_another_with_another_function_variable_or_setting_of_the_script(monkeypatch):
    def key_now(**settings):
        return verified_models.key_of(Calling(SimpleNamespace(depth=2, **settings)), "", "x", Plan(pipeline=2))

    monkeypatch.setattr(script_globals, "is_of_script", lambda name: name == __name__)
    keys = [key_now(), key_now(penalty=True)]
    assert key_now() == keys[0]
    monkeypatch.setitem(SCALE, "of", ("another",))
    keys.append(key_now())
    monkeypatch.setitem(globals(), "scaled", lambda x: x * 3)
    keys.append(key_now())
    monkeypatch.setitem(globals(), "scaled", lambda x: x * 4)
    keys.append(key_now())
    assert len(set(keys)) == 5
