"""What workers know of transformers, while it may still be on its way in."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from moreh_ap.integrations import transformers_worker


def test_a_half_imported_library_is_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of a worker imports it while the first calls of a model that does not need it come in."""
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", ModuleType("transformers.cache_utils"))
    monkeypatch.setattr(transformers_worker, "_CACHES", set())
    _, treespec = pytree.tree_flatten({"logits": torch.ones(1)})
    assert transformers_worker.cache_leaves(treespec) == frozenset()


def test_modules_that_only_mix_in_a_class_of_transformers_record_nothing() -> None:
    """As the text encoder of SpeechT5, which is no `PreTrainedModel`."""
    mixin = type("EmbeddingAccessMixin", (), {"__module__": "transformers.modeling_utils"})
    transformers_worker.complete_unpickled(type("Prenet", (nn.Module, mixin), {})())
