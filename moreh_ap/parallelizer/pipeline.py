"""Forward and backward of a call through the stages of a pipeline.

Decides what travels between stages, and when a stage runs which micro-batch; the order itself is PyTorch's schedules'.
Must not know how a model was cut (`stages.py`), nor what a loss is.

[Note: two ways to run]
`PipelinedPass` runs forward at once and keeps its graph for a backward: what comes before each stage is waited for, so
one stage computes at a time. It serves where the result is needed before a backward is known: the proof of splitting,
and a loss that the script reads early. `PipelinedForward` waits for `backward` and then runs the plan's schedule.

[Note: who has the result]
The workers with the last stage. On all others `outputs` is empty and `has_result` False.

[Note: small batches]
A worker whose rows are fewer than the plan's micro-batches runs fewer. Where a schedule cannot do with so few, GPipe takes
its place for that call: it computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils._pytree import tree_flatten

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.containers import flatten, pickle_treespec, unpickle_treespec
from moreh_ap.parallelizer.forward import Call
from moreh_ap.parallelizer.gradient_sync import gradient_sync_of
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.micro_batches import DeferredForward
from moreh_ap.parallelizer.reduction import GlobalReduction, MetaReduction
from moreh_ap.parallelizer.sharding import compute_dtype, recover, settle
from moreh_ap.parallelizer.stages import Nesting, Stage, Stages, nesting_of, stages_of
from moreh_ap.plan import Plan

_Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor that travels between stages."""


class PipelinedPass:
    """A forward that has run through all stages, and its backward. See [Note: two ways to run].

    Same interface as `ForwardPass`; `has_result` says whether this worker has the outputs.
    """

    def __init__(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        reduction: GlobalReduction | None = None,
        chunk: int = 0,
    ) -> None:
        stages = _stages(call.module)
        self._call, self._stages = call, stages
        self._ran: list[tuple[Stage, list[Tensor], list[Tensor]]] = []  # stage, received, returned
        self.has_result = stages.axis.rank == stages.last_worker
        self.outputs: list[Any] = []
        self._results: list[Any] = []
        self.treespec: Any = None
        settle(call.module)
        try:
            with torch.set_grad_enabled(call.grad), reduction or call.reduction(), call.autocasting():
                for number, stage in stages.local.items():
                    self._run(number, stage, args, dict(kwargs), chunk)
        except BaseException:
            recover(call.module)
            raise
        if not call.grad:
            settle(call.module)
        self.differentiable = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in self._results]

    def _run(self, number: int, stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any], chunk: int) -> None:
        axis = self._stages.axis
        received, nesting = ([], None) if number == 0 else _receive(axis, (number - 1) % axis.size, self._call.device)
        self._call.seed_generators(chunk, number)
        result = stage(tuple(received), nesting, args, kwargs)
        if stage.is_last:
            self._results, self.treespec = flatten(result)
            self.outputs = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self._results]
            self._ran.append((stage, received, []))
            return
        self._ran.append((stage, received, list(result)))
        _send(axis, (number + 1) % axis.size, list(result), stage.nesting)

    def accumulate(self, output_grads: Sequence[Tensor | None], retain_graph: bool = False) -> list[Tensor | None]:
        """Adds to this worker's gradients; sums over workers are left to the caller.

        Args:
            output_grads: One gradient or None for each leaf of `outputs`; ignored where there is no result.
            retain_graph: Whether another backward may follow.
        """
        axis = self._stages.axis
        try:
            for stage, received, returned in reversed(self._ran):
                if stage.is_last:
                    roots, grads = _roots(self._call, self._results, output_grads)
                else:
                    roots = [t for t in returned if t.requires_grad]
                    grads = [torch.empty_like(t) for t in roots]
                    for grad in grads:
                        dist.recv(grad, group=axis.group, group_src=(stage.index + 1) % axis.size)
                if roots:
                    torch.autograd.backward(roots, grads, retain_graph=retain_graph)
                for leaf in received:
                    if leaf.requires_grad:
                        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
                        leaf.grad = None
                        dist.send(grad, group=axis.group, group_dst=(stage.index - 1) % axis.size)
        except BaseException:
            recover(self._call.module)
            raise
        return []


class PipelinedForward(DeferredForward):
    """A forward that waits for its backward and then runs the plan's schedule. See [Note: two ways to run]."""

    def __init__(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_chunks: int,
        rows: int,
        meta_module: nn.Module,
        plan: Plan,
    ) -> None:
        self._stages = _stages(call.module)
        self._plan = plan
        self._chunk_grads_given: list[list[Tensor | None]] = []
        if call.target is not None:
            raise UnsupportedError(
                "a pipeline trains the model as a whole, and a part of it was called with gradients",
                "calls of the model itself, calls of parts under torch.no_grad(), or plans with pipeline=1",
                'plan="shard=2"',
            )
        super().__init__(call, args, kwargs, num_chunks, rows, meta_module)
        self.has_result = self._stages.axis.rank == self._stages.last_worker
        if call.kinds is not None and len(call.kinds) != len(self.shapes):
            raise UnsupportedError(
                "a training call asks for results that earlier stages of the pipeline compute (hidden states?)",
                "results of the last stage, such calls under torch.no_grad(), or plans with pipeline=1",
                'plan="shard=2"',
            )
        if self.inputs:
            raise UnsupportedError(
                "a pipeline gives no gradients of tensors passed to the model",
                "inputs without requires_grad, or plans with pipeline=1",
                'plan="shard=2"',
            )

    def materialize(self) -> list[Any]:
        """Returns the leaves of the result, from a run without gradients unless backward has computed them."""
        if self._outputs is None:
            call = replace(self._call, grad=False)
            chunks = []
            for chunk in range(self._num_chunks):
                args, kwargs = self._chunk_arguments(chunk)
                reduction = self._reduction_of(self._stages.local)
                chunks.append(PipelinedPass(call, args, kwargs, reduction=reduction, chunk=chunk).outputs)
            self._outputs = self._join(chunks) if self.has_result else []
        return self._outputs

    def backward(self, output_grads: Sequence[Tensor | None], retain_graph: bool = False) -> list[Tensor | None]:
        """Runs the schedule. A second call computes everything once more, so `retain_graph` needs nothing."""
        self._chunk_grads_given = [self._chunk_grads(output_grads, chunk) for chunk in range(self._num_chunks)]
        settle(self._call.module)
        schedule, adapters = _schedule_for(self._stages, self._plan, self._num_chunks, self._call.device)
        chunks: list[Any] = [[] for _ in range(self._num_chunks)]
        for adapter in adapters:
            adapter.begin(self, chunks)
        numbers = list(range(self._num_chunks))
        try:
            with self._stages.sums_shared_gradients(), self._call.gradient_sync():
                schedule._step_microbatches(target_mbs=numbers)
        except BaseException:
            recover(self._call.module)
            raise
        finally:
            for adapter in adapters:
                adapter.end()
        self._chunk_grads_given = []
        settle(self._call.module)
        self._outputs = self._join(chunks) if self.has_result else []
        return []

    # -- what a stage asks ------------------------------------------------------------------------------------------

    def run_stage(self, stage: Stage, chunk: int, received: tuple[Tensor, ...]) -> list[Any]:
        """Returns what a stage makes of one micro-batch: tensors for the next stage, on the last one the results."""
        args, kwargs = self._chunk_arguments(chunk)
        self._call.seed_generators(chunk, stage.index)
        with torch.enable_grad(), self._reduction_of([stage.index]), self._call.autocasting():
            nesting = None if stage.index == 0 else self._borders[stage.index - 1][0]
            result = stage(received, nesting, args, kwargs)
        if stage.is_last:
            return flatten(result)[0]
        specs = self.border(stage.index, chunk)
        return [leaf.to(dtype) for leaf, (_, dtype) in zip(result, specs, strict=True)]

    def border(self, stage: int, chunk: int) -> list[_Spec]:
        """Returns shapes and dtypes of what a stage returns for one micro-batch."""
        start, stop = self._chunk_range(chunk)
        computed = compute_dtype(self._call.module)
        found = []
        for shape, dtype in self._borders[stage][1]:
            if shape and shape[0] == self._rows:
                shape = (stop - start, *shape[1:])
            dtype = computed if computed is not None and dtype.is_floating_point else dtype
            found.append((self._stages.local_shape(shape), dtype))
        return found

    def roots(self, results: list[Any], chunk: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the results of a micro-batch that have gradients, with these."""
        return _roots(self._call, results, self._chunk_grads_given[chunk])

    def keeps_gradients_here(self) -> AbstractContextManager[None]:
        """Inside, what backward adds to gradients is not summed over workers yet."""
        sync = gradient_sync_of(self._call.module)
        return nullcontext() if sync is None else sync.local()

    # -- before anything runs ----------------------------------------------------------------------------------------

    @contextmanager
    def _observed(self, meta_module: nn.Module, reduction: MetaReduction) -> Iterator[None]:
        """Notes what stages return, and which means are taken inside which block."""
        stages = self._stages
        self._borders: dict[int, tuple[Nesting, list[_Spec]]] = {}
        self._block_sites: list[range] = []
        ends = {own.stop - 1: stage for stage, own in enumerate(stages.ranges)}

        def begin(block: nn.Module, args: Any) -> None:
            self._block_sites.append(range(len(reduction.local_denominators), 0))

        def end(block: nn.Module, args: Any, result: Any) -> None:
            number = len(self._block_sites) - 1
            self._block_sites[number] = range(self._block_sites[number].start, len(reduction.local_denominators))
            if number in ends:
                leaves, spec = tree_flatten(result)
                specs = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]
                lengths = (stages.split_length(shape) for shape, _ in specs)
                self._borders[ends[number]] = (nesting_of(leaves, spec, lengths), specs)

        with ExitStack() as hooks:
            for block in meta_module.get_submodule(stages.body).children():
                hooks.callback(block.register_forward_pre_hook(begin).remove)
                hooks.callback(block.register_forward_hook(end).remove)
            yield

    def _run_without_gradients(self) -> tuple[list[Any], Any, list[Tensor]]:
        raise UnsupportedError(
            f"a pipeline needs a forward that can be followed without values, {type(self._call.module).__name__}'s "
            "could not",
            "plans with pipeline=1 for this model",
            'plan="shard=2"',
        )

    def _sites_of(self, stage: int) -> list[int]:
        """Returns which means of the forward a stage takes: those outside blocks up to its end, and in its blocks."""
        own = self._stages.ranges[stage]
        last = own.stop == len(self._block_sites)
        stop = len(self._denominators) if last else self._block_sites[own.stop - 1].stop
        inside = {site: number for number, sites in enumerate(self._block_sites) for site in sites}
        return [site for site in range(stop) if inside.get(site, own.start) in own]

    def _reduction_of(self, stages: Iterable[int]) -> AbstractContextManager[Any]:
        if self._call.mode != "split":
            return self._call.reduction()
        own = [self._denominators[site] for stage in stages for site in self._sites_of(stage)]
        return GlobalReduction(self._call.device, group=self._call.group, denominators=own)


class _ScheduledStage(_PipelineStageBase):
    """A stage as PyTorch's schedules see it: what to receive, compute and send for each micro-batch."""

    def __init__(self, stage: Stage, stages: Stages, device: torch.device) -> None:
        super().__init__(stage, stage.index, stages.num_stages, device, stages.axis.group)
        self._run: PipelinedForward | None = None
        self._results: list[Any] = []
        self._received: dict[int, tuple[Tensor, ...]] = {}
        self._grads: dict[int, tuple[Tensor, ...]] = {}

    @property
    def run(self) -> PipelinedForward:
        """The call under way."""
        assert self._run is not None
        return self._run

    def begin(self, run: PipelinedForward, results: list[Any]) -> None:
        """Prepares for one run of the schedule; results of the last stage go to `results`, by micro-batch."""
        self._run, self._results = run, results
        self.has_backward = True

    def end(self) -> None:
        """Forgets the run."""
        self._run, self._results = None, []
        for kept in (self._received, self._grads, self.fwd_cache, self.bwd_cache, self.backward_state, self.dw_runner):
            kept.clear()

    # What PyTorch would find out by a trial run is known (`PipelinedForward.border`).

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None:
        self.args_recv_info = {0: ()}

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: dict[Any, Any]) -> tuple[Any, ...]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def clear_runtime_states(self) -> None:
        """`end` does it."""

    # Sending and receiving.

    def _ops(self, operation: Any, tensors: Iterable[Tensor], stage: int) -> list[dist.P2POp]:
        peer = self.stage_index_to_group_rank[stage]
        return [dist.P2POp(operation, tensor, group=self.group, group_peer=peer) for tensor in tensors]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        self._received[fwd_chunk_id] = self._empty(self.stage_index - 1, fwd_chunk_id)
        return self._ops(dist.irecv, self._received[fwd_chunk_id], self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        return self._ops(dist.isend, [t.detach().contiguous() for t in outputs], self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        self._grads[bwd_chunk_id] = _floating(self._empty(self.stage_index, bwd_chunk_id))
        return self._ops(dist.irecv, self._grads[bwd_chunk_id], self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        grads = self.bwd_cache.pop(bwd_chunk_id)
        wanted = _floating(self._empty(self.stage_index - 1, bwd_chunk_id))
        sent = [like.zero_() if g is None else g.contiguous() for g, like in zip(grads, wanted, strict=True)]
        return self._ops(dist.isend, sent, self.stage_index - 1)

    def _empty(self, stage: int, chunk: int) -> tuple[Tensor, ...]:
        return tuple(torch.empty(s, dtype=dtype, device=self.device) for s, dtype in self.run.border(stage, chunk))

    # Computing.

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        received = self._received.pop(fwd_chunk_id, ())
        for tensor in _floating(received):
            tensor.requires_grad_()
        outputs = self.run.run_stage(self.submod, fwd_chunk_id, received)
        if self.is_last:
            self._results[fwd_chunk_id] = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in outputs]
            outputs, self._grads[fwd_chunk_id] = self.run.roots(outputs, fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = (outputs, list(_floating(received)))
        return outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        outputs, received = self.fwd_cache.pop(bwd_chunk_id)
        roots = [t for t in outputs if t.is_floating_point()]
        given = {"output_grads": self._grads.pop(bwd_chunk_id), "input_values": received}
        grads: Any = ()
        with nullcontext() if last_backward and full_backward else self.run.keeps_gradients_here():
            if full_backward:
                grads, _ = self.backward_maybe_with_nosync(
                    "full", {"stage_output": tuple(roots), **given}, last_backward=last_backward
                )
            else:
                # Detached in place by PyTorch, which views do not allow.
                roots = [root.clone() if root._is_view() else root for root in roots]
                param_groups = None
                if not self.is_first:
                    grads, param_groups = self.backward_maybe_with_nosync(
                        "input", {"stage_output": tuple(roots), **given}, last_backward=last_backward
                    )
                self.backward_state[bwd_chunk_id] = (roots, param_groups, given)
        self.bwd_cache[bwd_chunk_id] = grads

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        roots, param_groups, given = self.backward_state.pop(bwd_chunk_id)
        kind, rest = ("full", given) if self.is_first else ("weight", {"param_groups": param_groups})
        with self.run.keeps_gradients_here():
            self.backward_maybe_with_nosync(kind, {"stage_output": tuple(roots), **rest}, last_backward=last_backward)


def _floating(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors if t.is_floating_point())


def _schedule_for(
    stages: Stages, plan: Plan, num_chunks: int, device: torch.device
) -> tuple[Any, list[_ScheduledStage]]:
    """Returns the plan's schedule for so many micro-batches, and its view of this worker's stages."""
    if num_chunks not in stages.schedules:
        adapters = [_ScheduledStage(stage, stages, device) for stage in stages.local.values()]
        kind = _kind_for(plan, num_chunks)
        single = kind in (ScheduleGPipe, Schedule1F1B)
        schedule = kind(adapters[0] if single else adapters, num_chunks, loss_fn=_no_loss, scale_grads=False)
        stages.schedules[num_chunks] = (schedule, adapters)
    return stages.schedules[num_chunks]


def _kind_for(plan: Plan, num_chunks: int) -> type:
    """Returns the schedule's class. See [Note: small batches]."""
    rounds = max(1, num_chunks // plan.pipeline)
    if plan.schedule == "1f1b" and num_chunks >= plan.pipeline:
        return Schedule1F1B
    if plan.schedule == "interleaved" and num_chunks % rounds == 0:
        return ScheduleInterleaved1F1B
    if plan.schedule == "zero_bubble" and num_chunks % rounds == 0:
        return ScheduleInterleavedZeroBubble
    return ScheduleGPipe if plan.stages_per_device == 1 else ScheduleLoopedBFS


def _no_loss(output: Any, target: Any) -> Tensor:
    """Tells schedules that there is a backward; the gradients of the results are given, not derived from a loss."""
    return torch.zeros(())


def _send(axis: Axis, place: int, tensors: list[Tensor], nesting: Nesting | None) -> None:
    specs = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
    assert nesting is not None
    leaves, treespec = nesting
    dist.send_object_list([(specs, leaves, pickle_treespec(treespec))], group=axis.group, group_dst=place)
    for tensor in tensors:
        dist.send(tensor.detach().contiguous(), group=axis.group, group_dst=place)


def _receive(axis: Axis, place: int, device: torch.device) -> tuple[list[Tensor], Nesting]:
    header: list[Any] = [None]
    dist.recv_object_list(header, group=axis.group, group_src=place)
    specs, leaves, pickled_treespec = header[0]
    received = []
    for shape, dtype, requires_grad in specs:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, group=axis.group, group_src=place)
        received.append(tensor.requires_grad_(requires_grad and torch.is_grad_enabled()))
    return received, (leaves, unpickle_treespec(pickled_treespec))


def _stages(module: nn.Module) -> Stages:
    found = stages_of(module)
    assert found is not None
    return found


def _roots(
    call: Call, results: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    roots, given = [], []
    for index, (result, grad) in enumerate(zip(results, grads, strict=True)):
        if grad is not None and isinstance(result, Tensor) and result.requires_grad:
            roots.append(result)
            given.append(call.output_gradient(index, result, grad))
    return roots, given
