"""Shows, on a few rows, whether a forward gives the same on slices of a batch as on the whole.

Decides between "split" and "whole", and what each leaf of the result is. Must not know how the batch will be cut.

[Note: method]
Two or three rows of the real batch run together and then one by one, as if each row were on a worker of its own, with
the same denominators of mean losses. So that both runs compute the same function, both draw the same random numbers
where workers will (`draws.py`), and dropout is off otherwise. If every leaf of the
single runs adds up to the leaf of the common run in one of the ways below, and the gradients of some parameters do
too, rows do not look at each other. Batch normalisation, contrastive losses, a time-first LSTM, or a penalty on the
weights inside forward fail here, and the forward then runs whole: slower, still right.

What FSDP2 gathers on its way through the model is gathered by all workers at once, so rows must also take the same way:
where one goes to some experts and another to others, the forward runs whole.

"rows": the slices follow each other along dim 0. "share": they add up. "same": every slice has it.
"const": no tensor, equal everywhere. "opaque": an object that cannot be compared; each worker has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import get_world_size, is_initialized
from torch.utils._pytree import tree_flatten, tree_unflatten

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.call.dry_run import NoDropout, state_restored, untouched
from moreh_ap.parallelizer.call.forward import Call, ForwardPass
from moreh_ap.parallelizer.call.parameter_writes import WrittenParameters
from moreh_ap.parallelizer.call.pipelined_forward import PipelinedPass
from moreh_ap.parallelizer.data.fsdp import Way, compute_dtype, recover, settle, way_through
from moreh_ap.parallelizer.data.global_rng import Draw, DrawRecorder, Share, UnsharedDraw, draws_of
from moreh_ap.parallelizer.data.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.pipeline.stages import stages_of
from moreh_ap.parallelizer.state.loading import local_part
from moreh_ap.parallelizer.tensor.split_tensor import SplitTensor
from moreh_ap.protocol.batch import carries_rows, select_rows
from moreh_ap.protocol.passed_state import Reads
from moreh_ap.protocol.rng_state import seeded_state_of_host, state_of_host

TOLERANCE_FP32 = 2e-5
"""Largest difference, relative to the largest entry of a tensor, that rounding explains in float32 (eps 1.2e-7)."""
TOLERANCE_BF16 = 3e-2
"""The same in bfloat16 (eps 7.8e-3)."""

_NOISE = 1e-2
"""A gradient may differ by this part of the tolerance times the largest of all compared gradients (2e-7 in float32).

The bias of an attention key has a gradient of zero but for rounding: relative to itself it is never equal.
"""

_MAX_COMPARED_PARAMETERS = 24

_CLASS_DTYPES = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}

_COINS = 6
"""With how many other states of Python's and NumPy's streams a forward that draws from them is followed too."""


@dataclass(frozen=True)
class SplitProof:
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
            `reduction.py`.
    """

    split: bool
    kinds: tuple[str, ...]
    reason: str
    means: bool = True
    counts: bool = False
    draws: tuple[Draw, ...] = ()
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    written: str = ""


class _Refused(Exception):
    """The forward cannot be split; the text says why."""


def prove_split(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> SplitProof:
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
        return SplitProof(False, (), "the batch has one row")
    call = replace(call, mode="whole", seed=None, kinds=None, counts=False)
    with untouched(call.module):
        probe = _Probe(call, args, kwargs, rows)
        found = _prove(probe)
        divides_itself = not found.split and not _everywhere(not probe.saw_counts, call)
        del probe  # and the activations in it
        if divides_itself:
            for param in call.module.parameters():
                param.grad = None
            with_counts = _prove(_Probe(replace(call, counts=True), args, kwargs, rows))
            found = with_counts  # its reason, too, says more
    return found


def find_reads(
    call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int | None, names: Collection[str]
) -> set[str]:
    """Returns which attributes the forward of `call` reads before it sets them itself, of those called `names`.

    A forward of a few rows that ends early tells of those that it has come to. It leaves nothing. A collective, as
    `prove_split`.
    """
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    if rows is not None and rows > 1:
        leaves = select_rows(leaves, rows, _choose_rows(leaves, rows))
    args, kwargs = tree_unflatten(leaves, spec)
    call = replace(call, mode="whole", seed=None, kinds=None, counts=False, grad=False)
    reads = Reads(call.module, names)

    def run() -> None:
        with reads, NoDropout(), WrittenParameters(call.module):
            ForwardPass(call, args, kwargs, reduction=GlobalReduction(call.device, record=True))

    with untouched(call.module):
        _attempt(run, call.module)
    return reads.found


def _prove(probe: _Probe) -> SplitProof:
    call = probe.call
    steps = [probe.compare_draws] if call.stream is not None else []
    steps += [probe.compare_outputs, probe.compare_gradients] if call.grad else [probe.compare_outputs]
    for step in steps:
        reason = _attempt(step, call.module)
        if not _everywhere(reason == "", call):
            reason = reason or "another worker found that rows look at each other"
            return SplitProof(False, (), reason, written=probe.written)
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
    return SplitProof(True, last, "", probe.takes_means, call.counts, probe.draws, attributes)


def _attempt(step: Callable[[], None], module: nn.Module) -> str:
    """Returns why `step` failed, "" where it did not."""
    try:
        step()
    except (_Refused, UnsharedDraw) as refusal:
        return str(refusal)
    except Exception as error:  # the forward itself raised: on fewer rows than it was written for, or always
        recover(module)
        first_line = str(error).partition("\n")[0]
        return f"the forward of a few rows raised {type(error).__name__}: {first_line}"
    return ""


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


class _Probe:
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
        self._chosen = _choose_rows(self._leaves, rows)
        self._tolerance = _tolerance(call)
        self.written = ""
        self._writes_nothing = False
        self._buffers: dict[str, Tensor] = {}
        self._ways: list[Way] = []
        self._singles: list[ForwardPass | PipelinedPass] = []
        self._weights: list[Tensor | None] = []
        self._wanted: dict[str, Tensor | None] = {}

    def compare_draws(self) -> None:
        """Runs one row, and two if that drew anything, and finds which dims of what they draw have the rows.

        Raises:
            UnsharedDraw: They do not tell.
        """
        self.call.seed_generators()
        before = state_of_host()
        self.draws = self._draws_with(self.call.host_stream)
        if state_of_host() != before:  # coins of Python or NumPy: what is drawn may depend on how they fall
            for seed in range(_COINS):
                found = self._draws_with(seeded_state_of_host(seed))
                self.draws += tuple(dict.fromkeys(draw for draw in found if draw not in self.draws))

    def _draws_with(self, host_stream: bytes | None) -> tuple[Draw, ...]:
        call = replace(self.call, grad=False, host_stream=host_stream)
        recorders = []
        for chosen in (self._chosen[:1], self._chosen[:2]):
            args, kwargs = tree_unflatten(select_rows(self._leaves, self._rows, chosen), self._spec)
            recorders.append(DrawRecorder())
            with self._from_the_same_state(), recorders[-1]:
                ForwardPass(call, args, kwargs, reduction=GlobalReduction(call.device, record=True))
            if not recorders[-1].drawn:
                return ()
        return draws_of(*(recorder.drawn for recorder in recorders))

    def compare_outputs(self) -> None:
        """Runs the rows together and one by one, and finds the kinds.

        Raises:
            _Refused: The results do not add up.
        """
        recorder = GlobalReduction(self.call.device, record=True, counts=self.call.counts)
        common = self._run(self._chosen, recorder)
        self.saw_counts = recorder.saw_counts
        denominators = recorder.local_denominators
        self.takes_means = bool(denominators)
        if self.call.grad:  # at once: the activations of the common run need not live beside those of the single ones
            self._weights = [_random_weight(leaf) for leaf in common.outputs]
            common.accumulate(self._weights)
            self._wanted = self._take_gradients()
        counted = []
        for row in self._chosen:
            reduction = GlobalReduction(self.call.device, denominators=denominators, counts=self.call.counts)
            self._singles.append(self._run([row], reduction))
            counted.append(reduction.local_denominators)
        self._check_ways()
        _check_denominators(denominators, counted)
        self.attributes = common.attributes
        if common.gathered:
            raise _Refused(f"attribute {common.gathered[0]} gathers what it sees of the rows")
        self.has_unknown = isinstance(common, PipelinedPass) and any(map(_is_unknown, common.outputs))
        if any(single.treespec != common.treespec for single in self._singles):
            raise _Refused("the result of one row nests differently from that of several")
        self.kinds = tuple(
            _kind(name, leaf, [single.outputs[index] for single in self._singles], self._tolerance)
            for index, (name, leaf) in enumerate(zip(_names_of(common), common.outputs, strict=True))
        )
        numbers = [leaf for leaf in common.outputs if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if numbers and all(leaf.ndim == 0 and not local_part(leaf) for leaf in numbers):
            raise _Refused("the loss of a few rows is zero, which shows nothing about more of them")

    def compare_gradients(self) -> None:
        """Runs backward of the single runs, and compares what some parameters got with the common run.

        Raises:
            _Refused: The gradients do not add up.
        """
        number = len(self._singles)
        for position, single in enumerate(self._singles):
            parts: list[Tensor | None] = []
            for kind, weight in zip(self.kinds, self._weights, strict=True):
                if weight is None or kind == "share":
                    parts.append(weight)
                elif kind == "rows":
                    entries = weight.shape[0] // number
                    parts.append(weight.narrow(0, position * entries, entries))
                else:
                    parts.append(weight / number)
            single.accumulate(parts)
        got_by_name = self._take_gradients()
        wanted = [grad.abs().max() for grad in self._wanted.values() if grad is not None and grad.numel()]
        noise = _NOISE * self._tolerance * float(max(wanted, default=0.0))
        for name, want in self._wanted.items():
            got = got_by_name[name]
            if (got is None) != (want is None):
                raise _Refused(f"whether {name} gets a gradient depends on the rows")
            if got is not None and want is not None and not _close(got, want, 10 * self._tolerance, noise):
                raise _Refused(f"the gradient of {name} is not the sum of what its rows give one by one")

    def _take_gradients(self) -> dict[str, Tensor | None]:
        """Returns this worker's part of the gradients of some parameters, and clears all."""
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
            _Refused: Parameters were changed: workers would change them by what they see of the rows.
        """
        module = self.call.module
        writes = None if self._writes_nothing else WrittenParameters(module)
        with state_restored(module), writes or nullcontext():
            yield
        self._writes_nothing = writes is None or not writes.names
        if writes is not None and writes.names:
            self.written = writes.names[0]
            raise _Refused(f"the forward changes parameter {self.written}")

    def _run(self, chosen: Sequence[int], reduction: GlobalReduction) -> ForwardPass | PipelinedPass:
        """Runs the chosen rows, from the same buffers every time.

        Raises:
            _Refused: A buffer becomes something else than in the first run: it gathers what it saw of the rows.
        """
        args, kwargs = tree_unflatten(select_rows(self._leaves, self._rows, chosen), self._spec)
        first = self._chosen.index(chosen[0])
        call = replace(self.call, draws=self.draws, share=Share(first, first + len(chosen), len(self._chosen)))
        with self._from_the_same_state():
            with nullcontext() if self.draws else NoDropout(), way_through(call.module) as way:
                runs_in_stages = call.grad and stages_of(call.module) is not None
                run = PipelinedPass if runs_in_stages else ForwardPass
                done = run(call, args, kwargs, reduction=reduction)
            after = {name: buffer.detach().clone() for name, buffer in call.module.named_buffers()}
            own = len(done.outputs) - sum(done.attributes.values())
            # An attribute that was changed in place is put back with the rest of the state: what it became is kept.
            done.outputs[own:] = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in done.outputs[own:]]
        self._ways.append(way)
        self._buffers = self._buffers or after
        for name, value in after.items():
            if not _close(value, self._buffers[name], self._tolerance):
                raise _Refused(f"buffer {name} gathers what it sees of the rows")
        return done


    def _check_ways(self) -> None:
        """Compares how the runs went, the common one first.

        Raises:
            _Refused: It depends on the rows, in which order and with how much of them they come to what FSDP2 gathers.
        """
        common, first, *others = self._ways
        if [name for name, _ in common] != [name for name, _ in first] or any(way != first for way in others):
            raise _Refused(
                "which blocks a row goes through depends on the row, and a plan that shards gathers a block on all "
                "devices at once"
            )


def _check_denominators(common: Sequence[Tensor], singles: Sequence[Sequence[Tensor]]) -> None:
    for site, whole in enumerate(common):
        parts = sum(float(single[site]) for single in singles)
        if abs(parts - float(whole)) > 1e-9 * max(1.0, abs(float(whole))):
            raise _Refused(f"mean {site} of the forward counts {float(whole)} together but {parts} row by row")


def _names_of(run: ForwardPass | PipelinedPass) -> list[str]:
    """Returns what the leaves of a result are called in a refusal."""
    of_attributes = [f"attribute {name}" for name, number in run.attributes.items() for _ in range(number)]
    return [f"output {index}" for index in range(len(run.outputs) - len(of_attributes))] + of_attributes


def _kind(name: str, common: Any, singles: Sequence[Any], tolerance: float) -> str:
    if not isinstance(common, Tensor):
        if any(type(s) is not type(common) for s in singles):
            raise _Refused(f"{name} has another type for some rows")
        if all(_equal(s, common) for s in singles):
            return "const"
        if isinstance(common, (str, bytes, int, float, complex, torch.dtype, torch.device)):
            raise _Refused(f"{name} ({common!r}) differs from row to row")
        return "opaque"
    if _follows(common, singles) and _close(torch.cat(list(map(local_part, singles))), common, tolerance):
        return "rows"
    if all(s.shape == common.shape for s in singles):
        common, singles = local_part(common), list(map(local_part, singles))
        adds_up = common.dtype != torch.bool and _close(sum(singles[1:], start=singles[0]), common, tolerance)
        same = all(_close(s, common, tolerance) for s in singles)
        if same and not (adds_up and common.ndim == 0):
            return "same"
        if adds_up:
            return "share"
    raise _Refused(
        f"{name} of shape {tuple(common.shape)} is not what its rows give one by one: rows look at each other"
    )


def _follows(common: Tensor, singles: Sequence[Any]) -> bool:
    """Says whether the shapes are those of equal slices along dim 0; a row may have several entries there."""
    if common.ndim == 0 or common.shape[0] % len(singles):
        return False
    return all(s.shape == (common.shape[0] // len(singles), *common.shape[1:]) for s in singles)


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left is right or left == right)
    except (TypeError, ValueError, RuntimeError):
        return False


def _is_unknown(leaf: Any) -> bool:
    """Says whether a result holds what a stage puts in place of values that it does not have."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and bool(local_part(leaf).isnan().any())


def _close(got: Tensor, wanted: Tensor, tolerance: float, noise: float = 0.0) -> bool:
    """Says whether all differences are within `tolerance` of the largest entry wanted, or within `noise`."""
    got, wanted = local_part(got), local_part(wanted)
    if got.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(got, wanted)
    if wanted.numel() == 0:
        return True
    got, wanted = got.float(), wanted.float()
    largest, difference = (torch.linalg.vector_norm(x, torch.inf) for x in (wanted, got - wanted))
    if torch.isfinite(largest) and torch.isfinite(difference):
        return bool(difference <= max(tolerance * float(largest), noise))
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(got), finite):
        return False
    if not finite.any():
        return True
    largest = wanted[finite].abs().max()
    return bool((got - wanted)[finite].abs().max() <= max(tolerance * float(largest), noise))


def _random_weight(leaf: Any) -> Tensor | None:
    """Returns a gradient for an output that tells its entries apart; equal on every worker."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return None
    if leaf.ndim == 0:
        return torch.ones_like(leaf)
    if isinstance(leaf, SplitTensor):
        part = _random_weight(leaf.part)
        assert part is not None
        return SplitTensor(part, leaf.shape[leaf.split_dim], leaf.split_dim, leaf.crossing)
    entries = torch.arange(leaf.numel(), device=leaf.device, dtype=torch.float32)
    return (torch.sin(entries) / max(1, leaf.numel()) ** 0.5).reshape(leaf.shape).to(leaf.dtype)


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
    return local_part(param.grad).detach().clone()


def _tolerance(call: Call) -> float:
    dtypes = {p.dtype for p in call.module.parameters()} | {compute_dtype(call.module), call.autocast}
    return TOLERANCE_BF16 if dtypes & {torch.bfloat16, torch.float16} else TOLERANCE_FP32


def _choose_rows(leaves: Sequence[Any], rows: int) -> list[int]:
    """Returns the two rows that differ most in how much of them counts (padding), in rising order.

    A row of which no target counts (labels of -100 alone) says nothing about a loss and is chosen last. A third row is
    chosen where rows have classes: losses that compare a row with one of its own class and one of another (triplets)
    are zero for any two rows.
    """
    filled, targets = torch.zeros(rows), torch.full((rows,), torch.inf)
    for leaf in leaves:
        if carries_rows(leaf, rows) and not (leaf.is_floating_point() or leaf.is_complex()):
            filled += (leaf > 0).reshape(rows, -1).sum(1).cpu()
            targets = torch.minimum(targets, (leaf >= 0).reshape(rows, -1).sum(1).cpu())
    order = [row for row in filled.argsort(stable=True).tolist() if targets[row] > 0]
    if len(order) < 2:
        order = filled.argsort(stable=True).tolist()
    chosen = [order[0], order[-1]]
    return sorted({*chosen, *_complete_classes(leaves, rows, chosen)})


def _complete_classes(leaves: Sequence[Any], rows: int, chosen: Sequence[int]) -> list[int]:
    """Returns a row with which `chosen` has two rows of one class and one of another, if there is one."""
    for leaf in leaves:
        if carries_rows(leaf, rows) and leaf.numel() == rows and leaf.dtype in _CLASS_DTYPES:
            classes = leaf.flatten().tolist()
            here = [classes[row] for row in chosen]
            for row, own in enumerate(classes):
                if row not in chosen and (own not in here if here[0] == here[1] else own in here):
                    return [row]
    return []
