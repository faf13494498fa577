"""Which numbers of a forward are those of the batch, beyond what the operations themselves say.

Decides how that is written down. Must not know how it is found out or computed with (`loss_reduction.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeanRules:
    """Numbers of a forward that are not those of a worker's rows. The notes are in `loss_reduction.py`.

    Attributes:
        counts: Whether the numbers of true elements of masks are denominators too. See [Note: counts].
        beside_rows: Call sites whose means over dim 0 leave the rows alone: `torch.stack(heads).mean(0)`.
        lengths: Whether packed sequences are padded to the longest of the batch. See [Note: lengths].
        extremes: Whether the largest whole number in a tensor is that of the batch. See [Note: lengths].
        constants: Call sites whose means are those of the batch on every worker. See [Note: products of means].
        loads: Call sites that tell how many rows go to each expert, or whether any goes to one. See [Note: loads].
    """

    counts: bool = False
    beside_rows: frozenset[int] = frozenset()
    lengths: bool = False
    extremes: bool = False
    constants: frozenset[int] = frozenset()
    loads: frozenset[int] = frozenset()


NO_RULES, LENGTHS = MeanRules(), MeanRules(lengths=True)
