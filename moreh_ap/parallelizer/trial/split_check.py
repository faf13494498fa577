"""Shows, on a few rows, whether a forward gives the same on slices of a batch as on the whole.

Decides between "split" and "unsplit", and what each leaf of the result is. Must not know how the batch will be cut.

[Note: method]
Two or three rows of the real batch run together and then one by one, as if each row were on a worker of its own, with
the same denominators of mean losses. So that both runs compute the same function, both draw the same random numbers
where workers will (`rng/policy.py`), and dropout is off otherwise. If every leaf of the single runs adds up to the
leaf of the common run in one of the ways below, and the gradients of some parameters do too, rows do not depend on each
other. Contrastive losses, a time-first LSTM, or a penalty on the weights inside forward fail here. Where normalisation
took statistics of the rows, a few rows are tried once more as a real split call whose workers exchange statistics
(`joined_probe.py`). Where that fails too, the workers learn where in the forward rows meet, and try a split call that
gathers them there (`gathering_probe.py`). What fails in every way runs unsplit: slower, still right.

A forward that raises an error on single rows is tried on 2, 4, 8 rows and on as many as a worker gets, if one device
raises it too: then the forward cannot run on so few. An error that one device does not raise is a fault of ours, and is
reported (`fault_finding.py`).

What FSDP2 gathers on its way through the model is gathered by all workers at once, so rows must also take the same way:
where one goes to some experts and another to others, the forward runs unsplit.

"rows": the slices follow each other along dim 0. "share": they add up. "same": every slice has it.
"const": no tensor, equal everywhere. "count": a whole number, such as that of the rows, that adds up. "opaque": an
object that cannot be compared; each worker has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.data.opened_blocks import joining_opened
from moreh_ap.parallelizer.loss.mean_rules import MeanRules
from moreh_ap.parallelizer.pipeline.stages import stages_of
from moreh_ap.parallelizer.rng.shared_draws import have_several
from moreh_ap.parallelizer.row_dims.kept_rows import KeptRows, may_be_kept, shapes_of
from moreh_ap.parallelizer.row_dims.own_entries import OwnEntries, may_number_entries
from moreh_ap.parallelizer.row_dims.placed_probe import PlacedJoinedProbe, PlacedProbe
from moreh_ap.parallelizer.row_dims.read_numbers import ASKS_NUMBERS
from moreh_ap.parallelizer.statistics.float64_trial import Float64Probe, in_float64, may_run_in_float64, to_float64
from moreh_ap.parallelizer.statistics.parts_probe import NOT_WHOLE, PartsProbe
from moreh_ap.parallelizer.trial.agreement import everywhere
from moreh_ap.parallelizer.trial.dry_run import clear_gradients, untouched
from moreh_ap.parallelizer.trial.gathering_probe import GatheringProbe, gathering_probes
from moreh_ap.parallelizer.trial.hidden_terms import with_filled
from moreh_ap.parallelizer.trial.joined_probe import FEWEST_A_WORKER, JoinedProbe
from moreh_ap.parallelizer.trial.other_values import OtherValues
from moreh_ap.parallelizer.trial.probe import Probe
from moreh_ap.parallelizer.trial.probe_verdict import verdict_of
from moreh_ap.parallelizer.trial.row_comparison import gathered_kinds, group_sizes
from moreh_ap.parallelizer.trial.split_verdict import Apart, Joined, SplitVerdict
from moreh_ap.protocol.batch import are_single_rows, row_dims_without_weights, rows_along, rows_elsewhere
from moreh_ap.protocol.messages.calls import SINGLE_ROW

_Probe = TypeVar("_Probe", bound=Probe)


@joining_opened
def check_split(
    call: Call,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rows: int,
    *,
    may_join: bool = False,
    may_turn: bool = False,
    pieces: int = 1,
) -> SplitVerdict:
    """Returns whether the forward of `call` may run on slices of the batch.

    A collective: every worker has to call it with the same arguments. Gradients, buffers and random numbers are left
    as they were, and nothing is printed.

    Args:
        call: What will run; its mode does not matter. With `grad`, gradients are compared too.
        args: Positional arguments with the whole batch.
        kwargs: Keyword arguments, likewise.
        rows: Rows of the batch.
        may_join: Whether workers may exchange statistics of their rows, or rows, inside the forward.
        may_turn: Whether the rows may lie along another dim than the first.
        pieces: Into how many micro-batches each worker cuts its rows.
    """
    if rows < 2:
        return SplitVerdict.unsplit("the batch has one row")
    rules = MeanRules(lengths=may_join and stages_of(call.module) is None)
    call = replace(call, mode="unsplit", random=call.random.for_probe(), kinds=None, rules=rules, joined=False)
    trials = _Trials(call, args, kwargs, rows)
    with untouched(call.module):
        found = trials.run(call.axis.size * pieces, may_join=may_join, may_turn=may_turn)
        leaves, shapes = tree_leaves((tuple(args), dict(kwargs))), shapes_of(args, kwargs)
        counts = [] if found.split or found.added else [rows]
        if counts and may_turn:
            counts += [others for _, others in rows_elsewhere(leaves, 2)]
        for kept in (KeptRows(names, n, shapes) for n in counts for names in may_be_kept(call.module, n)):
            others = _Trials(replace(call, extensions=(kept, *call.extensions)), args, kwargs, rows)
            again = others.run(call.axis.size * pieces, may_join=may_join, may_turn=may_turn)
            if again.split and kept.rows == (rows if again.dims is None else rows_along(leaves, again.dims)):
                return replace(again, kept=kept.names, faults=tuple(others.faults), by_values=others.by_values)
        may_number = counts and pieces == 1 < call.axis.size and stages_of(call.module) is None
        for entries in may_number_entries(leaves, rows) if may_number else ():
            others = _Trials(replace(call, extensions=(*call.extensions, OwnEntries(entries))), args, kwargs, rows)
            again = others.run(call.axis.size, may_join=may_join, may_turn=False)
            if again.split:
                return replace(again, entries=entries, faults=tuple(others.faults), by_values=others.by_values)
    return replace(found, faults=tuple(trials.faults), by_values=trials.by_values)


@joining_opened
def check_other_dims(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SplitVerdict | None:
    """Returns how a call may be split whose rows do not lie along dim 0, which has too few; None if it may not.

    Arguments as `check_split`'s. A collective.
    """
    if stages_of(call.module) is not None:
        return None
    rules = MeanRules(lengths=True)
    call = replace(call, mode="unsplit", random=call.random.for_probe(), kinds=None, rules=rules, joined=False)
    with untouched(call.module):
        return _Trials(call, args, kwargs, 0).run_along_other_dims()


class _Trials:
    """The ways in which a forward is tried, one after the other until one is right. Arguments as `check_split`'s.

    Attributes:
        faults: Tracebacks of errors that are ours.
        by_values: Whether the forward asks numbers among its arguments what to do.
    """

    def __init__(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> None:
        self._call, self._args, self._kwargs, self._rows = call, args, kwargs, rows
        self._leaves, self._spec = tree_flatten((tuple(args), dict(kwargs)))
        self._other_values = OtherValues(args, kwargs, self._fillings)
        self._may_write = True
        self.faults: list[str] = []
        self.by_values = False

    def run(self, parts: int, *, may_join: bool, may_turn: bool) -> SplitVerdict:
        """Returns the first verdict that splits the call, or else the one that says why no way to split is exact."""
        call, rows = self._call, self._rows
        sizes = group_sizes(rows, parts)
        self._may_write = may_join
        may_meet = may_join and 1 < call.axis.size <= rows and stages_of(call.module) is None
        for each in sizes:
            apart = self._run_apart(call, rows, may_meet, each=each)
            if apart.found.could_run or apart.untried:
                break
        else:
            each = 1
        found = apart.found
        if found.added:
            return found
        if may_meet and apart.untried:
            found = self._run_joined(apart.untried, each)
        if not found.split and may_meet:
            found = (self.run_along_other_dims() if may_turn else None) or found
        if not found.split and may_meet:
            found = self._run_gathering(apart.untried, each) or found
            if may_turn and (not found.split or any(step.gathers for step in found.steps)):
                found = self._gather_along_other_dims() or found
            if may_turn and not found.split:
                dims = row_dims_without_weights(self._leaves)
                found = (None if dims is None else self._run_along([(dims, rows)])) or found
        fewest = FEWEST_A_WORKER if found.joined else 1  # rows that meet may be more than a worker has
        if found.split and each > fewest and found.dims is None:
            found = replace(found, group=each)
        if not found.could_run and are_single_rows(self._leaves, rows):
            found = replace(found, reason=SINGLE_ROW)
        return found

    def _run_gathering(self, untried: Sequence[MeanRules], each: int) -> SplitVerdict | None:
        """Tries rows that are gathered where they meet; None if that is not exact either."""
        number = len(self.faults)
        for leaves in self._fillings():
            could_run = False
            args, kwargs = tree_unflatten(leaves, self._spec)
            for gathering in gathering_probes(self._call, args, kwargs, self._rows, each):
                found = self._of_all_steps(self._compare_under_rules(gathering, number), gathering)
                if found.split and untried:
                    found = self._of_all_rows(Joined(found, gathering.draws, gathering.counts_rows), untried, each)
                if found.split:
                    return found
                could_run = could_run or found.could_run
            if could_run:
                break
        return None

    def _fillings(self) -> Iterator[list[Any]]:
        """Yields leaves of arguments to try, one after the other until the forward can run with them."""
        filled_in = self._leaves if self.by_values else with_filled(self._leaves, self._rows)
        if not everywhere(filled_in is self._leaves, self._call):
            yield filled_in
        yield self._leaves

    def _run_apart(
        self, call: Call, rows: int, may_place: bool, dims: Sequence[int | None] | None = None, each: int = 1
    ) -> Apart:
        """Tries rows by themselves: as they are, and with other of the forward's numbers as means over the batch."""
        kind, number = PlacedProbe if may_place else Probe, len(self.faults)

        def run(call: Call) -> tuple[Probe, SplitVerdict]:
            def make() -> Probe:
                probe = kind(call, self._args, self._kwargs, rows, dims, each)
                probe.may_take_turns = may_place
                return probe

            return self._compare_both_ways(make, number)

        probe, found = run(call)
        call, probe, found = self._with_loads(probe, found, run) if may_place else (call, probe, found)
        if found.split or found.added:
            return Apart(found)
        counts, statistics, extremes = (
            not everywhere(what not in probe.saw, call) for what in ("counts", "statistics", "extremes")
        )
        rules, others = call.rules, []
        if not everywhere(not probe.beside_rows, call):
            rules = replace(rules, beside_rows=probe.beside_rows)
            others.append(rules)
        constants = frozenset(probe.constant_places)
        del probe  # and the activations in it
        others += [replace(rules, extremes=True)] if extremes and may_place else []
        others += [replace(rules, constants=constants)] if may_place and not everywhere(not constants, call) else []
        others += [replace(one, counts=True) for one in (rules, *others[-1:])] if counts else []
        if statistics:
            return Apart(found, (rules, *(other for other in others if other != rules)))
        for other in others:
            _, again = run(replace(call, rules=other))
            if again.split or not (other.extremes or other.constants):  # its reason, too, says more
                found = again
            if found.split:
                break
        return Apart(found)

    def _with_loads(
        self, probe: Probe, found: SplitVerdict, run: Callable[[Call], tuple[Probe, SplitVerdict]]
    ) -> tuple[Call, Probe, SplitVerdict]:
        """Returns call, probe and verdict, tried once more with the loads of experts those of the whole batch where the
        forward draws for routed rows. See [Note: loads] in `loss_reduction.py`."""
        call, loads = probe.call, probe.loads
        if found.added or everywhere(not loads, call):
            return call, probe, found
        with_loads, before = replace(call, rules=replace(call.rules, loads=loads)), self._call
        again, as_well = run(with_loads)
        if not as_well.split and (found.split or not everywhere(again.draws_told, call)):
            return call, probe, found
        self._call = replace(before, rules=replace(before.rules, loads=loads))
        return with_loads, again, as_well

    def _run_joined(self, untried: Sequence[MeanRules], each: int) -> SplitVerdict:
        """Tries rows of which normalisations take statistics: a few of them, in float64 too, and all, where statistics
        are of parts of the batch."""
        call = self._call
        joined = self._try_rules(PlacedJoinedProbe, untried, each)
        if not joined.found.split and everywhere(may_run_in_float64(call), call):
            with in_float64(call.module):
                args, kwargs = to_float64((self._args, self._kwargs))
                exact = _Trials(call, args, kwargs, self._rows)._try_rules(Float64Probe, untried, each)
            joined = exact if exact.found.split and exact.draws == joined.draws else joined
        return self._of_all_rows(joined, untried, each)

    def _try_rules(self, kind: type[JoinedProbe], untried: Sequence[MeanRules], each: int) -> Joined:
        """Tries the rows under some rules, until they are right."""
        number = len(self.faults)
        for rules in untried:
            call = replace(self._call, rules=rules)
            make = partial(kind, call, self._args, self._kwargs, self._rows, each=each)
            probe, found = self._compare_both_ways(make, number)
            if found.split:
                break
        return Joined(found, probe.draws, probe.counts_rows)

    def _of_all_rows(self, joined: Joined, untried: Sequence[MeanRules], each: int) -> SplitVerdict:
        """Returns the verdict on all rows of the batch, given that on a few. See [Note: how many parts] in
        `statistics/batch_parts.py`."""
        found = joined.found
        if found.split and not joined.counts_rows:
            return found
        probe = PlacedJoinedProbe(self._call, self._args, self._kwargs, self._rows, each=each)
        parts = probe.find_parts(until_errors=bool(found.steps))  # behind steps that gather, a worker may need all rows
        alike = range(self._rows, self._rows + 1)
        if parts and not found.steps:
            return replace(self._try_rules(PartsProbe, untried, each).found, sizes=alike)
        if found.split and parts == ():
            return replace(found, sizes=found.sizes or range(self._rows + 1))
        return SplitVerdict.unsplit(NOT_WHOLE, sizes=alike) if found.split else found

    def _of_all_steps(self, found: SplitVerdict, probe: GatheringProbe) -> SplitVerdict:
        """Returns the verdict on all rows of a batch that gathers, given that on a few. See [Note: numbers] in
        `lockstep.py`."""
        if not found.split or not (probe.counts_rows or any(step.is_of_one_size for step in found.steps)):
            return found
        steps = probe.steps_of_batch()
        alike = range(probe.rows, probe.rows + 1)
        if steps is None:
            reason = "all rows of the batch lead to other functions than a few of them"
            return SplitVerdict.unsplit(reason, sizes=alike)
        is_of_one_size = any(step.is_of_one_size for step in steps)
        return replace(found, steps=steps, sizes=alike if is_of_one_size else range(probe.rows + 1))

    def run_along_other_dims(self) -> SplitVerdict | None:
        """Tries rows that lie elsewhere than along dim 0 by themselves; None if that is not right."""
        return self._run_along(rows_elsewhere(self._leaves, self._call.axis.size))

    def _run_along(self, places: Iterable[tuple[Sequence[int | None], int]]) -> SplitVerdict | None:
        for dims, rows in places:
            found = self._run_apart(self._call, rows, True, dims).found
            if found.split:
                return replace(found, dims=tuple(dims))
        return None

    def _compare_both_ways(self, make: Callable[[], _Probe], first: int) -> tuple[_Probe, SplitVerdict]:
        """Compares with what is drawn for a row lying together, or else, where a row has several entries, apart."""
        probe = make()
        found = self._compare_under_rules(probe, first)
        if found.split or found.added or everywhere(not have_several(probe.draws.stream), probe.call):
            return probe, found
        other = make()
        other.repeats = True
        again = self._compare_under_rules(other, first)
        return (other, again) if again.split else (probe, found)

    def _compare_under_rules(self, probe: Probe, first: int) -> SplitVerdict:
        """Compares one of several ways to take numbers; `first` is how many faults there were before them. Errors of
        others came of their rules where this one is right, and its own of counts, extremes or loads where they are
        not."""
        number, rules = len(self.faults), probe.call.rules
        found = self._compare(probe)
        if found.split or rules.counts or rules.extremes or rules.constants or rules.loads:
            del self.faults[first if found.split else number :]
        return found

    def _compare(self, probe: Probe) -> SplitVerdict:
        clear_gradients(self._call.module)
        probe.may_write = self._may_write
        found = verdict_of(probe)
        self.by_values |= bool(probe.numbers) and not everywhere(ASKS_NUMBERS not in probe.saw, self._call)
        if "count" in found.kinds and not (self._may_write and stages_of(self._call.module) is None):
            found = SplitVerdict.unsplit("a whole number in the result differs from row to row")
        self.faults += found.faults
        return self._other_values.judge(probe, found)

    def _gather_along_other_dims(self) -> SplitVerdict | None:
        """Tries a batch whose rows lie elsewhere than along dim 0; None if it is none, or if its rows meet as well."""
        for dims, rows in rows_elsewhere(self._leaves, self._call.axis.size):
            for leaves in self._fillings():
                args, kwargs = tree_unflatten(leaves, self._spec)
                found = self._compare(GatheringProbe(self._call, args, kwargs, rows, dims))
                meet = any(step.gathers or step.is_of_one_size for step in found.steps)
                if found.split and not meet:
                    attributes = {name: gathered_kinds(kinds) for name, kinds in found.attributes.items()}
                    return replace(found, dims=tuple(dims), kinds=gathered_kinds(found.kinds), attributes=attributes)
                if found.could_run:
                    break
        return None
