"""What a forward gives with other values than a few rows have, where those show nothing about more rows.

Decides which other values are tried, and what follows from it. Must not know in which ways a call may be split
(`split_check.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten

from moreh_ap.parallelizer.pipeline.stages import stages_of
from moreh_ap.parallelizer.row_dims.common_decisions import DECIDE, of_several_rows
from moreh_ap.parallelizer.row_dims.equal_rows import with_equal_rows, with_marks
from moreh_ap.parallelizer.row_dims.row_steps import SHARE
from moreh_ap.parallelizer.row_dims.selections import COUNTS_SELECTED
from moreh_ap.parallelizer.trial.agreement import everywhere
from moreh_ap.parallelizer.trial.dry_run import clear_gradients
from moreh_ap.parallelizer.trial.hidden_terms import filled, own_zeros_of, zeros_of
from moreh_ap.parallelizer.trial.probe import Probe
from moreh_ap.parallelizer.trial.probe_verdict import verdict_of
from moreh_ap.parallelizer.trial.row_comparison import DEPEND, OUTPUT
from moreh_ap.parallelizer.trial.split_verdict import SplitVerdict
from moreh_ap.protocol.batch import select_rows_along

DROPS_ROWS = "how many rows the forward has selected, by their values, decides which of them count"


class OtherValues:
    """Tries what was found right once more with other values; `judge` is the entry.

    Args:
        args: Positional arguments with the whole batch.
        kwargs: Keyword arguments, likewise.
        fillings: Yields leaves of arguments without zeros, then those that were given.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], fillings: Callable[[], Iterator[list[Any]]]
    ) -> None:
        self._args, self._kwargs, self._fillings = args, kwargs, fillings
        self._leaves, self._spec = tree_flatten((tuple(args), dict(kwargs)))
        self._drops = False

    def judge(self, probe: Probe, found: SplitVerdict) -> SplitVerdict:
        """Returns what was found, or why it is refused. A collective."""
        ways = () if probe.steps else (self._without_zeros, self._beside_others, self._with_copies, self._with_masks)
        for way in (*ways, self._with_equal_rows):
            if not found.split:
                break
            found = way(probe, found)
        return found

    def _without_zeros(self, probe: Probe, found: SplitVerdict) -> SplitVerdict:
        """With other values in place of zeros. See `hidden_terms.py`."""
        kinds = [*found.kinds, *itertools.chain(*found.attributes.values())]
        of_all = SHARE in kinds or not probe.call.grad
        zeros = (zeros_of if of_all else own_zeros_of)(probe.call.module)
        is_told = everywhere(not zeros, probe.call)
        for leaves in self._fillings():
            is_given = all(one is other for one, other in zip(leaves, self._leaves, strict=True))
            if is_given and is_told:
                break
            with filled(zeros):
                again = self._verdict(self._like(probe, leaves))
            if again.could_run or is_given:  # else the argument has to be zero
                return found.with_results_of(again) if again.split else replace(again, could_run=found.could_run)
        return found

    def _with_equal_rows(self, probe: Probe, found: SplitVerdict) -> SplitVerdict:
        """With rows that are all alike. See [Note: all to one expert] in `equal_rows.py`."""
        if not self._drops and not everywhere(COUNTS_SELECTED not in probe.saw, probe.call):
            again = self._verdict(self._like(probe, with_equal_rows(self._leaves, probe.dims)))
            self._drops = again.reason.endswith(DEPEND)  # others show nothing
        return replace(found, split=False, kinds=(), reason=DROPS_ROWS) if self._drops else found

    def _with_copies(self, probe: Probe, found: SplitVerdict) -> SplitVerdict:
        """With copies of a row. See [Note: copies of a row] in `equal_rows.py`."""
        has_statistics = not everywhere("statistics" not in probe.saw, probe.call)
        for row in probe.chosen if self._divides(probe) and not has_statistics else ():
            leaves = select_rows_along(self._leaves, probe.dims, [row] * probe.rows)
            found = _unless_shares_are_none(found, self._verdict(self._like(probe, leaves)))
            if not found.split:
                break
        return found

    def _with_masks(self, probe: Probe, found: SplitVerdict) -> SplitVerdict:
        """With masks that are true everywhere. See [Note: masks of other rows] in `equal_rows.py`."""
        if not self._divides(probe):
            return found
        other = self._like(probe, with_marks(self._leaves, probe.dims))
        other.marks_all = True
        return _unless_shares_are_none(found, self._verdict(other))

    def _divides(self, probe: Probe) -> bool:
        """Says whether the forward divides by a number, or reads one that it may divide by."""
        return not everywhere("divisions" not in probe.saw, probe.call)

    def _beside_others(self, probe: Probe, found: SplitVerdict) -> SplitVerdict:
        """Beside rows that decide otherwise. See `common_decisions.py`."""
        together, *apart = (noted.decisions for noted in probe.noted)
        other, which = self._like(probe, self._leaves), of_several_rows(together, apart)
        if stages_of(probe.call.module) is not None or everywhere(not which, probe.call):
            return found
        other.beside = which
        depend = self._verdict(other).reason.endswith(DEPEND)  # others, such as a check that raises, show nothing
        return replace(found, split=False, kinds=(), reason=DECIDE) if depend else found

    def _verdict(self, probe: Probe) -> SplitVerdict:
        clear_gradients(probe.call.module)
        return verdict_of(probe)

    def _like(self, probe: Probe, leaves: Sequence[Any]) -> Probe:
        """Returns a probe of the same kind, without gradients."""
        args, kwargs = tree_unflatten(leaves, self._spec)
        other = type(probe)(replace(probe.call, grad=False), args, kwargs, probe.rows, probe.dims, probe.each)
        other.may_take_turns, other.may_write, other.repeats = probe.may_take_turns, probe.may_write, probe.repeats
        return other


def _unless_shares_are_none(found: SplitVerdict, again: SplitVerdict) -> SplitVerdict:
    """Returns what was found, or why it is refused after another trial, in which rows depend on each other, or a result
    that seemed to add up does not."""
    pairs = enumerate(zip(found.kinds, again.kinds)) if again.split else ()
    is_divided = [number for number, (kind, other) in pairs if kind == SHARE != other]
    reason = f"{OUTPUT} {is_divided[0]} is divided by what its rows give: {DEPEND}" if is_divided else again.reason
    return replace(found, split=False, kinds=(), reason=reason) if reason.endswith(DEPEND) else found
