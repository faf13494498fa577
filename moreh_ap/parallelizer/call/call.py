"""A call of a module as a worker runs it: split or unsplit, with which random numbers, gradients and extensions.

Decides which facts about a call every kind of execution has to know. Must not know how they are carried out, the
controller, messages, or where the batch came from.

[Note: split and unsplit]
"split": this worker has its slice of the batch; mean losses are shares of the global mean (`loss_reduction.py`); its
random numbers are its part of the batch's (`rng/policy.py`), or, without a common stream, its own. "unsplit": every
worker has the whole batch and the same random numbers and computes the same. Gradients are summed over workers
afterwards: that of a result goes backward on the first worker, and zeros on the others. (Equal parts of it would give
another sum where a backward is not linear, such as a hook that clamps.) Gradients of inputs are the first worker's.

[Note: kinds]
Each leaf of a result has a kind (`split_check.py`): "rows", "share", "same", "const" or "count". A "same" leaf of a
split call is computed by every worker, so its gradient too counts for one part in the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from moreh_ap.parallelizer.call.extension import CallExtension
from moreh_ap.parallelizer.items.item_reduction import ItemRules
from moreh_ap.parallelizer.loss.mean_rules import NO_RULES, MeanRules
from moreh_ap.parallelizer.mesh import Axis, world_axis
from moreh_ap.parallelizer.rng.policy import RandomPolicy
from moreh_ap.parallelizer.row_dims.placed_rows import PlacedRows
from moreh_ap.parallelizer.row_dims.row_steps import Gathering
from moreh_ap.parallelizer.statistics.batch_parts import Part


@dataclass(frozen=True)
class Call:
    """A call of a module; equal on every worker but for `axis` and `random`.

    Attributes:
        module: The module a plan was applied to.
        mode: "split" or "unsplit". See [Note: split and unsplit].
        device: This worker's device.
        grad: Whether a backward may follow.
        axis: The workers that share the batch; by default all of them.
        random: Which random numbers are drawn.
        autocast: Dtype of `torch.autocast` around the forward, None for none.
        target: What to call instead of the module: one of its submodules or bound methods.
        extensions: What the call uses beyond an ordinary one, the innermost first.
        kinds: The kind of every leaf of the result, where it is known. See [Note: kinds].
        rules: Which numbers of the forward are means over the batch.
        joined: Whether batch normalisation takes the statistics of all workers' rows (`batch_statistics.py`).
        parts: The normalisations that take those of parts of the batch instead, which workers have whole.
        gathering: Where rows are gathered inside the forward; None: nowhere.
        placed: Where arguments and results have rows that do not lie along dim 0 of all of them; None: nowhere.
        items: What the forward does with the items of a batch whose tensors have no rows; None: it has rows.
        means: Whether the forward takes means over the batch, where it is known. See [Note: workers meet] in
            `loss_reduction.py`.
        lacks_rows: Whether the batch has no row for this worker. See [Note: no row] in `lent_rows.py`.
        meets_failed: Whether a worker whose forward raises still meets the others, who do not wait for it elsewhere.
    """

    module: nn.Module
    mode: str
    device: torch.device
    grad: bool = True
    axis: Axis = field(default_factory=world_axis)
    random: RandomPolicy = field(default_factory=RandomPolicy)
    autocast: torch.dtype | None = None
    target: Callable[..., Any] | None = None
    extensions: tuple[CallExtension, ...] = ()
    kinds: tuple[str, ...] | None = None
    rules: MeanRules = NO_RULES
    joined: bool = False
    parts: tuple[Part, ...] = ()
    gathering: Gathering | None = None
    placed: PlacedRows | None = None
    items: ItemRules | None = None
    means: bool = True
    lacks_rows: bool = False
    meets_failed: bool = False


class SumsGradients(Protocol):
    """Sums over workers what a backward adds to gradients."""

    def sync(self) -> AbstractContextManager[None]:
        """Returns what has to be active during a backward."""


GRADIENT_SYNCS = "_moreh_gradient_syncs"
"""Where a module has the objects that sum its gradients over workers."""


def attach_gradient_sync(module: nn.Module, sync: SumsGradients) -> None:
    """Makes every backward of calls of `module` run under `sync`."""
    module.__dict__.setdefault(GRADIENT_SYNCS, []).append(sync)
