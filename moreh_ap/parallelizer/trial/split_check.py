"""Shows, on a few rows, whether a forward gives the same on slices of a batch as on the whole.

Decides between "split" and "unsplit", and what each leaf of the result is. Must not know how the batch will be cut.

[Note: method]
Two or three rows of the real batch run together and then one by one, as if each row were on a worker of its own, with
the same denominators of mean losses. So that both runs compute the same function, both draw the same random numbers
where workers will (`rng/policy.py`), and dropout is off otherwise. If every leaf of the single runs adds up to the
leaf of the common run in one of the ways below, and the gradients of some parameters do too, rows do not look at each
other. Batch normalisation, contrastive losses, a time-first LSTM, or a penalty on the weights inside forward fail here,
and the forward then runs whole: slower, still right.

What FSDP2 gathers on its way through the model is gathered by all workers at once, so rows must also take the same way:
where one goes to some experts and another to others, the forward runs whole.

"rows": the slices follow each other along dim 0. "share": they add up. "same": every slice has it.
"const": no tensor, equal everywhere. "opaque": an object that cannot be compared; each worker has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import get_world_size, is_initialized
from torch.utils._pytree import tree_flatten, tree_unflatten

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.execution import Execution
from moreh_ap.parallelizer.call.forward import EagerForward
from moreh_ap.parallelizer.call.parameter_writes import WrittenParameters
from moreh_ap.parallelizer.call.pipelined_forward import PipelinedPass
from moreh_ap.parallelizer.data.fsdp import BlockTrace, compute_dtype, record_block_order, settle
from moreh_ap.parallelizer.data.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.pipeline.stages import stages_of
from moreh_ap.parallelizer.rng.policy import RandomPolicy
from moreh_ap.parallelizer.rng.shared_draws import Draw, Share
from moreh_ap.parallelizer.state.loading import local_shard
from moreh_ap.parallelizer.trial.dry_run import NoDropout, Refused, attempt, state_restored, untouched
from moreh_ap.parallelizer.trial.row_comparison import (
    TOLERANCE_BF16,
    TOLERANCE_FP32,
    check_denominators,
    choose_rows,
    close,
    is_unknown,
    kind_of,
    random_weight,
)
from moreh_ap.protocol.batch import select_rows

_NOISE = 1e-2
"""A gradient may differ by so much of the tolerance times the largest of all compared gradients (2e-7 in float32).

The bias of an attention key has a gradient of zero but for rounding: relative to itself it is never equal.
"""

_MAX_COMPARED_PARAMETERS = 24


@dataclass(frozen=True)
class SplitVerdict:
    """The verdict on one forward, the same on every worker.

    Attributes:
        split: Whether slices of the batch give exactly what the whole batch gives.
        kinds: The kind of every leaf of the result but for attributes; empty where `split` is False.
        attributes: The kinds of the leaves of each attribute that the forward sets.
        reason: Why it cannot be split; empty where it can.
        draws: Of everything drawn from a common stream, how the rows lie in it; empty without such a stream.
        written: A parameter that the forward itself changes; empty where it changes none.
        means: Whether it takes means over the batch.
        counts: Whether it can be split only if numbers of true elements are denominators. See [Note: counts] in
            `loss_reduction.py`.
    """

    split: bool
    kinds: tuple[str, ...]
    reason: str
    means: bool = True
    counts: bool = False
    draws: tuple[Draw, ...] = ()
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    written: str = ""


def check_split(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> SplitVerdict:
    """Returns whether the forward of `call` may run on slices of the batch.

    A collective: every worker has to call it with the same arguments. Gradients, buffers and random numbers are left
    as they were, and nothing is printed.

    Args:
        call: What will run; its mode does not matter. With `grad`, gradients are compared too.
        args: Positional arguments with the whole batch.
        kwargs: Keyword arguments, likewise.
        rows: Rows of the batch.
    """
    if rows < 2:
        return SplitVerdict(False, (), "the batch has one row")
    call = replace(call, mode="unsplit", random=call.random.for_probe(), kinds=None, counts=False)
    with untouched(call.module):
        probe = _SplitTrial(call, args, kwargs, rows)
        found = _run_checks(probe)
        divides_itself = not found.split and not _everywhere(not probe.saw_counts, call)
        del probe  # and the activations in it
        if divides_itself:
            for param in call.module.parameters():
                param.grad = None
            with_counts = _run_checks(_SplitTrial(replace(call, counts=True), args, kwargs, rows))
            found = with_counts  # its reason, too, says more
    return found


def _run_checks(probe: _SplitTrial) -> SplitVerdict:
    call = probe.call
    steps = [probe.compare_draws, probe.compare_outputs]
    steps += [probe.compare_gradients] if call.grad else []
    for step in steps:
        reason = attempt(step, call.module)
        if not _everywhere(reason == "", call):
            reason = reason or "another worker found that rows depend on each other"
            return SplitVerdict(False, (), reason, written=probe.written)
    if not _everywhere(not probe.has_unknown, call):
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
    return SplitVerdict(True, last, "", probe.takes_means, call.counts, probe.draws, attributes)


def _everywhere(ok: bool, call: Call) -> bool:
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


class _SplitTrial:
    """The common run and the single runs of a few rows. See [Note: method]."""

    def __init__(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> None:
        self.kinds: tuple[str, ...] = ()
        self.attributes: Mapping[str, int] = {}
        self.draws: tuple[Draw, ...] = ()
        self.has_unknown = False
        self.saw_counts = self.takes_means = False
        self.call = call
        self._leaves, self._spec = tree_flatten((tuple(args), dict(kwargs)))
        self._rows = rows
        self._chosen = choose_rows(self._leaves, rows)
        self._tolerance = _tolerance(call)
        self.written = ""
        self._writes_nothing = False
        self._buffers: dict[str, Tensor] = {}
        self._ways: list[BlockTrace] = []
        self._singles: list[EagerForward | PipelinedPass] = []
        self._weights: list[Tensor | None] = []
        self._wanted: dict[str, Tensor | None] = {}

    def compare_draws(self) -> None:
        """Runs one row, and two if that drew anything, and finds which dims of what they draw have the rows.

        Raises:
            UnsharedDraw: They do not tell.
        """
        call = replace(self.call, grad=False)

        def forward(random: RandomPolicy, num_rows: int) -> None:
            args, kwargs = tree_unflatten(select_rows(self._leaves, self._rows, self._chosen[:num_rows]), self._spec)
            with self._from_the_same_state():
                its_call = replace(call, random=random)
                EagerForward(its_call, args, kwargs, reduction=GlobalReduction(call.device, record=True))

        self.draws = self.call.random.find_draws(self.call.device, forward)

    def compare_outputs(self) -> None:
        """Runs the rows together and one by one, and finds the kinds.

        Raises:
            Refused: The results do not add up.
        """
        recorder = GlobalReduction(self.call.device, record=True, counts=self.call.counts)
        common = self._run(self._chosen, recorder)
        self.saw_counts = recorder.saw_counts
        denominators = recorder.local_denominators
        self.takes_means = bool(denominators)
        if self.call.grad:  # at once: the activations of the common run need not live beside those of the single ones
            self._weights = [random_weight(leaf) for leaf in common.outputs]
            common.accumulate(self._weights)
            self._wanted = self._take_gradients()
        counted = []
        for row in self._chosen:
            reduction = GlobalReduction(self.call.device, denominators=denominators, counts=self.call.counts)
            self._singles.append(self._run([row], reduction))
            counted.append(reduction.local_denominators)
        self._check_ways()
        check_denominators(denominators, counted)
        self.attributes = common.attributes
        if common.gathered:
            raise Refused(f"attribute {common.gathered[0]} gathers what it sees of the rows")
        self.has_unknown = common.runs_in_stages and any(map(is_unknown, common.outputs))
        if any(single.treespec != common.treespec for single in self._singles):
            raise Refused("the result of one row nests differently from that of several")
        self.kinds = tuple(
            kind_of(name, leaf, [single.outputs[index] for single in self._singles], self._tolerance)
            for index, (name, leaf) in enumerate(zip(_names_of(common), common.outputs, strict=True))
        )
        numbers = [leaf for leaf in common.outputs if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if numbers and all(leaf.ndim == 0 and not local_shard(leaf) for leaf in numbers):
            raise Refused("the loss of a few rows is zero, which shows nothing about more of them")

    def compare_gradients(self) -> None:
        """Runs backward of the single runs, and compares what some parameters got with the common run.

        Raises:
            Refused: The gradients do not add up.
        """
        number = len(self._singles)
        for position, single in enumerate(self._singles):
            row_gradients: list[Tensor | None] = []
            for kind, weight in zip(self.kinds, self._weights, strict=True):
                if weight is None or kind == "share":
                    row_gradients.append(weight)
                elif kind == "rows":
                    entries = weight.shape[0] // number
                    row_gradients.append(weight.narrow(0, position * entries, entries))
                else:
                    row_gradients.append(weight / number)
            single.accumulate(row_gradients)
        got_by_name = self._take_gradients()
        wanted = [grad.abs().max() for grad in self._wanted.values() if grad is not None and grad.numel()]
        noise = _NOISE * self._tolerance * float(max(wanted, default=0.0))
        for name, want in self._wanted.items():
            got = got_by_name[name]
            if (got is None) != (want is None):
                raise Refused(f"whether {name} gets a gradient depends on the rows")
            if got is not None and want is not None and not close(got, want, 10 * self._tolerance, noise):
                raise Refused(f"the gradient of {name} is not the sum of what its rows give one by one")

    def _take_gradients(self) -> dict[str, Tensor | None]:
        """Returns this worker's shard of the gradients of some parameters, and clears all."""
        module = self.call.module
        settle(module)
        gradients = {name: _local_gradient(param) for name, param in _some_parameters(module).items()}
        for param in module.parameters():
            param.grad = None
        return gradients

    @contextmanager
    def _from_the_same_state(self) -> Iterator[None]:
        """Puts buffers, attributes and parameters back after the block.

        Raises:
            Refused: Parameters were changed: workers would change them by what they see of the rows.
        """
        module = self.call.module
        writes = None if self._writes_nothing else WrittenParameters(module)
        with state_restored(module), writes or nullcontext():
            yield
        self._writes_nothing = writes is None or not writes.names
        if writes is not None and writes.names:
            self.written = writes.names[0]
            raise Refused(f"the forward changes parameter {self.written}")

    def _run(self, chosen: Sequence[int], reduction: GlobalReduction) -> EagerForward | PipelinedPass:
        """Runs the chosen rows, from the same buffers every time.

        Raises:
            Refused: A buffer becomes something else than in the first run: it gathers what it saw of the rows.
        """
        args, kwargs = tree_unflatten(select_rows(self._leaves, self._rows, chosen), self._spec)
        first = self._chosen.index(chosen[0])
        share = Share(first, first + len(chosen), len(self._chosen))
        call = replace(self.call, random=self.call.random.shared(0, share, self.draws))
        with self._from_the_same_state():
            with nullcontext() if self.draws else NoDropout(), record_block_order(call.module) as way:
                runs_in_stages = call.grad and stages_of(call.module) is not None
                run = PipelinedPass if runs_in_stages else EagerForward
                done = run(call, args, kwargs, reduction=reduction)
            after = {name: buffer.detach().clone() for name, buffer in call.module.named_buffers()}
            own = len(done.outputs) - sum(done.attributes.values())
            # An attribute that was changed in place is put back with the rest of the state: what it became is kept.
            set_by_forward = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in done.outputs[own:]]
            done.outputs = [*done.outputs[:own], *set_by_forward]
        self._ways.append(way)
        self._buffers = self._buffers or after
        for name, value in after.items():
            if not close(value, self._buffers[name], self._tolerance):
                raise Refused(f"buffer {name} gathers what it sees of the rows")
        return done

    def _check_ways(self) -> None:
        """Compares how the runs went, the common one first.

        Raises:
            Refused: It depends on the rows, in which order and with how much of them they come to what FSDP2 gathers.
        """
        common, first, *others = self._ways
        if [name for name, _ in common] != [name for name, _ in first] or any(way != first for way in others):
            raise Refused(
                "which blocks a row goes through depends on the row, and a plan that shards gathers a block on all "
                "devices at once"
            )


def _names_of(run: Execution) -> list[str]:
    """Returns what the leaves of a result are called in a refusal."""
    of_attributes = [f"attribute {name}" for name, number in run.attributes.items() for _ in range(number)]
    return [f"output {index}" for index in range(len(run.outputs) - len(of_attributes))] + of_attributes


def _some_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    parameters = module.named_parameters()
    # What a forward has computed and put among the parameters is no leaf, and keeps no gradient.
    trainable = {name: p for name, p in parameters if p.requires_grad and p.is_leaf and not p.is_meta}
    names = list(trainable)
    step = max(1, -(-len(names) // _MAX_COMPARED_PARAMETERS))
    return {name: trainable[name] for name in [*names[::step], *names[-1:]]}


def _local_gradient(param: nn.Parameter) -> Tensor | None:
    if param.grad is None:
        return None
    return local_shard(param.grad).detach().clone()


def _tolerance(call: Call) -> float:
    dtypes = {p.dtype for p in call.module.parameters()} | {compute_dtype(call.module), call.autocast}
    return TOLERANCE_BF16 if dtypes & {torch.bfloat16, torch.float16} else TOLERANCE_FP32
