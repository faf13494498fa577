"""The losses over a vocabulary of Hugging Face transformers, which convert all logits to float32 first.

Installed in workers; it must not import transformers before other code does, or know how a loss is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from torch import Tensor

from moreh_ap.patching import PatchGroup

_OVER_A_VOCABULARY = ("ForCausalLMLoss", "ForMaskedLMLoss")
"""The functions that begin with ``logits = logits.float()`` and pass it to a cross-entropy."""


def surround(group: PatchGroup, surroundings: Callable[[Tensor], AbstractContextManager[Any]]) -> None:
    """Has these losses be computed inside of what `surroundings` returns for their logits.

    Args:
        group: Notes what is changed, now or when transformers is imported.
        surroundings: Given the logits, (batch, positions, vocabulary).
    """

    def change(module: ModuleType) -> None:
        table = module.LOSS_MAPPING
        for kind, loss in list(table.items()):
            if getattr(loss, "__name__", "") in _OVER_A_VOCABULARY:
                effect = f"{kind}: the loss is computed in the surroundings that its logits need."
                group.put(table, kind, _inside(surroundings, loss), "transformers.loss.loss_utils.LOSS_MAPPING", effect)

    group.when_imported("transformers.loss.loss_utils", change)


def _inside(surroundings: Callable[[Tensor], AbstractContextManager[Any]], loss: Callable[..., Any]) -> Any:
    @functools.wraps(loss)
    def compute(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        with surroundings(logits):
            return loss(logits, *args, **kwargs)

    return compute
