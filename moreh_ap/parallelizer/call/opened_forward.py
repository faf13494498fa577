"""A forward that is run once so that blocks which it opens join the rest of the model, where no trial does that.

Decides for which calls. Must not know how blocks are opened (`data/opened_blocks.py`), or how forwards are tried.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.forward import EagerForward
from moreh_ap.parallelizer.data.opened_blocks import blocks_apart, joining_opened
from moreh_ap.parallelizer.pipeline.stages import stages_of
from moreh_ap.parallelizer.trial.dry_run import attempt, untouched


def join_opened_blocks(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: set[Hashable]) -> None:
    """Has blocks that the forward of a call opens join the rest of the model where no trial does: for a batch of one
    row, or without rows. See [Note: opened] in `opened_blocks.py`. A collective.

    Args:
        call: What will run.
        args: Positional arguments with the whole batch.
        kwargs: Keyword arguments, likewise.
        known: What earlier calls had in common, to which this one is added.
    """
    common = call.target, call.grad, bytes([module.training for module in call.module.modules()])
    if common not in known and blocks_apart(call.module) and stages_of(call.module) is None:
        known.add(common)
        _look_for_opened(replace(call, random=call.random.for_probe()), args, kwargs)


@joining_opened
def _look_for_opened(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    with untouched(call.module):
        attempt(partial(EagerForward, call, args, kwargs), call.module)
