"""Verifications that are remembered."""

from __future__ import annotations

import json

from torch import nn

from moreh_ap.local import cache_files
from moreh_ap.plan import Plan
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
    assert len(others) == 3 and key not in others
    assert verified_models.key_of(Stack(), "", "x", Plan(tensor=2)) == key
    verified_models.FILE.path.write_text("[1")
    assert verified_models.look_up(key) is None
    verified_models.keep(key, "Stack", found)
    assert verified_models.look_up(key) == found
