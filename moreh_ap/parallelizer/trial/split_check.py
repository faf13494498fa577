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

What FSDP2 gathers on its way through the model is gathered by all workers at once, so rows must also take the same way:
where one goes to some experts and another to others, the forward runs unsplit.

"rows": the slices follow each other along dim 0. "share": they add up. "same": every slice has it.
"const": no tensor, equal everywhere. "opaque": an object that cannot be compared; each worker has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_world_size, is_initialized
from torch.utils._pytree import tree_leaves

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.data.row_gathering import Step
from moreh_ap.parallelizer.pipeline.stages import stages_of
from moreh_ap.parallelizer.rng.shared_draws import Draw
from moreh_ap.parallelizer.trial.dry_run import attempt, untouched
from moreh_ap.parallelizer.trial.gathering_probe import GatheringProbe
from moreh_ap.parallelizer.trial.joined_probe import JoinedProbe
from moreh_ap.parallelizer.trial.probe import Probe
from moreh_ap.protocol.batch import row_dims_elsewhere, rows_along


@dataclass(frozen=True)
class SplitVerdict:
    """The verdict on one forward, the same on every worker.

    Attributes:
        split: Whether slices of the batch give exactly what the whole batch gives.
        kinds: The kind of every leaf of the result but for attributes; empty where `split` is False.
        attributes: The kinds of the leaves of each attribute that the forward sets.
        reason: Why it cannot be split; empty where it can.
        draws: Of everything drawn from a common stream, how the rows lie in it; empty without such a stream.
        written: A parameter that the forward itself changes first; empty where it changes none.
        means: Whether it takes means over the batch.
        counts: Whether it can be split only if numbers of true elements are denominators. See [Note: counts] in
            `loss_reduction.py`.
        joined: Whether it can be split only if batch normalisation takes the statistics of all workers' rows.
        steps: What each function in it does with rows, where it can be split only if rows are gathered where they meet.
        dims: Where each leaf of the arguments has rows, where that is not dim 0 of all that have any.
    """

    split: bool
    kinds: tuple[str, ...]
    reason: str
    means: bool = True
    counts: bool = False
    joined: bool = False
    draws: tuple[Draw, ...] = ()
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    written: str = ""
    steps: tuple[Step, ...] = ()
    dims: tuple[int | None, ...] | None = None


def check_split(
    call: Call,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rows: int,
    *,
    may_join: bool = False,
    may_turn: bool = False,
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
    """
    if rows < 2:
        return SplitVerdict(False, (), "the batch has one row")
    call = replace(call, mode="unsplit", random=call.random.for_probe(), kinds=None, counts=False, joined=False)
    with untouched(call.module):
        probe = Probe(call, args, kwargs, rows)
        found = compare(probe)
        divides_itself = not found.split and not everywhere(not probe.saw_counts, call)
        takes_statistics = not found.split and not everywhere(not probe.saw_statistics, call)
        del probe  # and the activations in it
        if divides_itself and not takes_statistics:
            _clear_gradients(call)
            with_counts = compare(Probe(replace(call, counts=True), args, kwargs, rows))
            found = with_counts  # its reason, too, says more
        if takes_statistics and may_join and 1 < call.axis.size <= rows and stages_of(call.module) is None:
            _clear_gradients(call)
            found = compare(JoinedProbe(call, args, kwargs, rows))
            if not found.split and divides_itself:
                _clear_gradients(call)
                found = compare(JoinedProbe(replace(call, counts=True), args, kwargs, rows))
        if not found.split and may_join and 1 < call.axis.size <= rows and stages_of(call.module) is None:
            _clear_gradients(call)
            gathered = compare(GatheringProbe(call, args, kwargs, rows))
            found = gathered if gathered.split else found
            if may_turn and (not found.split or any(step.gathers for step in found.steps)):
                found = _elsewhere(call, args, kwargs) or found
    return found


def _elsewhere(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SplitVerdict | None:
    """Tries a batch whose rows lie along dim 1; None if it is none, or if its rows meet as well."""
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    dims = row_dims_elsewhere(leaves)
    rows = None if dims is None else rows_along(leaves, dims)
    if dims is None or rows is None or rows < call.axis.size:
        return None
    _clear_gradients(call)
    found = compare(GatheringProbe(call, args, kwargs, rows, dims))
    meet = any(step.gathers for step in found.steps)
    if not found.split or meet:
        return None
    attributes = {name: _gathered(kinds) for name, kinds in found.attributes.items()}
    return replace(found, dims=tuple(dims), kinds=_gathered(found.kinds), attributes=attributes)


def _gathered(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the kinds of a result whose rows are gathered at the end of the forward, as those of such a batch are."""
    return tuple("same" if kind == "rows" else kind for kind in kinds)


def _clear_gradients(call: Call) -> None:
    for param in call.module.parameters():
        param.grad = None


def compare(probe: Probe) -> SplitVerdict:
    call = probe.call
    steps = [probe.compare_draws, probe.compare_outputs]
    steps += [probe.compare_gradients] if call.grad else []
    for step in steps:
        reason = attempt(step, call.module)
        if not everywhere(reason == "", call):
            reason = reason or "another worker found that rows depend on each other"
            return SplitVerdict(False, (), reason, written=probe.written)
    if not everywhere(not probe.has_unknown, call):
        raise UnsupportedError(
            "a result of a training call is on an earlier stage of the pipeline (hidden states of every layer?)",
            "results that the last stage computes, calls under torch.no_grad(), or plans with pipeline=1",
            'plan="shard=2"',
        )
    kinds = probe.kinds
    attributes: dict[str, tuple[str, ...]] = {}
    for name, number in reversed(list(probe.attributes.items())):
        kinds, attributes[name] = kinds[: len(kinds) - number], kinds[len(kinds) - number :]
    last = _of_last_stage(kinds, call)
    found = SplitVerdict(True, last, "", probe.takes_means, call.counts, probe.is_joined, probe.draws, attributes)
    return replace(found, written=probe.written, steps=probe.steps)


def everywhere(ok: bool, call: Call) -> bool:
    """Says whether `ok` holds on every worker, so that all of them take the same way."""
    if not is_initialized() or get_world_size() == 1:
        return ok
    flag = torch.tensor(int(ok), device=call.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def _of_last_stage(kinds: tuple[str, ...], call: Call) -> tuple[str, ...]:
    """Returns what the workers found that have the result."""
    stages = stages_of(call.module)
    if stages is None or not call.grad:
        return kinds
    found = [kinds]
    dist.broadcast_object_list(found, group=stages.axis.group, group_src=stages.last_worker)
    return found[0]
