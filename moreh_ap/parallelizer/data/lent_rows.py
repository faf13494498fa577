"""A worker for which a split batch has no row: it computes another worker's, and adds nothing.

Decides how what it computes is kept out of the result. Must not know which row it is.

[Note: no row]
A batch of two rows on four workers gives two of them a row each. The others cannot run the forward on no rows: most
forwards fail on empty tensors (``x.view(len(x), -1)``). They cannot stay out of it either: others wait for them where
parameters are gathered and gradients summed. So each runs a row that another worker has too, which takes no longer than
the others take, and gives less than half the time of two rows computed by everybody. Its counts for mean losses are
zero; of its result the rows are cut off, and shares are multiplied by zero. So every gradient that its backward
computes is zero, and parameters have one all the same, as on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_unflatten

from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.protocol.pytree import flatten

NOTHING_OF = frozenset({"rows", "share", "same", "const"})
"""The kinds of leaves of which it is known how to add nothing."""


class LentRows(GlobalReduction):
    """Makes a forward that runs another worker's rows add nothing. Arguments as `GlobalReduction`'s.

    Args:
        kinds: The kinds of the leaves of the result.
    """

    def __init__(self, *args: Any, kinds: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kinds = kinds

    def finish(self, result: Any, settled: Callable[[Any], Any]) -> Any:
        leaves, spec = flatten(settled(result))
        return tree_unflatten([_nothing_of(leaf, kind) for leaf, kind in zip(leaves, self._kinds, strict=True)], spec)

    def _add_up(self, count: Tensor | int) -> Tensor:
        return super()._add_up(count * 0)


def _nothing_of(leaf: Any, kind: str) -> Any:
    """Returns what has to take the place of a leaf, with its history."""
    if kind == "rows":
        return leaf[:0]
    return leaf * 0 if kind == "share" else leaf
