"""One tensor from what all workers of several hosts answered of it.

Decides when it can be made without looking at each worker's answer: `LeafReply.join` is for all other cases.
"""

from __future__ import annotations

from torch import Tensor

from moreh_ap.protocol.messages.calls import ForwardReply
from moreh_ap.protocol.messages.tensors import LeafReply
from moreh_ap.runtime.relay.worker_values import Beside, ItemValues


def joined_leaf(answers: ItemValues, index: int) -> Tensor | None:
    """Returns the tensor if workers have answered the same but for its bytes, which are as many of each; else None.

    Args:
        answers: Of all workers: each a `ForwardReply`, or a list of `LeafReply`.
        index: Which of their leaves.
    """
    templates = answers.templates()
    if len(templates) != 1 or templates[0] is None:
        return None
    leaves = templates[0].leaves if isinstance(templates[0], ForwardReply) else templates[0]
    leaf: LeafReply = leaves[index]
    if not isinstance(leaf.data, Beside) or leaf.data.column.block is None:
        return None
    if leaf.kind == "share" or (leaf.kind == "rows" and leaf.shape):
        return leaf.joined_with(leaf.data.column.block, len(answers))
    return None
