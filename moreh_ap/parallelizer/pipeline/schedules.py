"""PyTorch's pipeline schedules over our stages: what each micro-batch receives, computes, sends, and when.

Decides how a plan's schedule is carried out. Must not know how a model was cut, what a loss is, or who asked.

[Note: small batches]
A worker whose rows are fewer than the plan's micro-batches runs fewer. Where a schedule cannot do with so few, GPipe
takes its place for that call: it computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from moreh_ap.parallelizer.pipeline.stage import Stage
from moreh_ap.parallelizer.pipeline.stages import Stages
from moreh_ap.parallelizer.surroundings.own_collectives import seeing_group
from moreh_ap.plan import Plan

Border = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor that travels between stages."""


class PipelineRun(Protocol):
    """A call under way, as a schedule sees it."""

    def run_stage(self, stage: Stage, micro_batch: int, received: tuple[Tensor, ...]) -> list[Any]:
        """Returns what a stage makes of one micro-batch: tensors for the next stage, on the last one the results."""

    def border(self, stage: int, micro_batch: int) -> list[Border]:
        """Returns shapes and dtypes of what a stage returns for one micro-batch."""

    def roots(self, results: list[Any], micro_batch: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the results of a micro-batch that have gradients, with these."""

    def keeps_gradients_here(self) -> AbstractContextManager[None]:
        """Inside, what backward adds to gradients is not summed over workers yet."""


class _ScheduledStage(_PipelineStageBase):
    """A stage as PyTorch's schedules see it: what to receive, compute and send for each micro-batch."""

    def __init__(self, stage: Stage, stages: Stages, device: torch.device) -> None:
        with seeing_group():
            super().__init__(stage, stage.index, stages.num_stages, device, stages.axis.group)
        self._stage = stage
        self._run: PipelineRun | None = None
        self._results: list[Any] = []
        self._received: dict[int, tuple[Tensor, ...]] = {}
        self._grads: dict[int, tuple[Tensor, ...]] = {}

    @property
    def run(self) -> PipelineRun:
        """The call under way."""
        assert self._run is not None
        return self._run

    def begin(self, run: PipelineRun, results: list[Any]) -> None:
        """Prepares for one run of the schedule; results of the last stage go to `results`, by micro-batch."""
        self._run, self._results = run, results
        self.has_backward = True

    def end(self) -> None:
        """Forgets the run."""
        self._run, self._results = None, []
        for kept in (self._received, self._grads, self.fwd_cache, self.bwd_cache, self.backward_state, self.dw_runner):
            kept.clear()

    # What PyTorch would find out by a trial run is known (`PipelineRun.border`).

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

    def _empty(self, stage: int, micro_batch: int) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(s, dtype=dtype, device=self.device) for s, dtype in self.run.border(stage, micro_batch)
        )

    # Computing.

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        received = self._received.pop(fwd_chunk_id, ())
        for tensor in _floating(received):
            tensor.requires_grad_()
        outputs = self.run.run_stage(self._stage, fwd_chunk_id, received)
        if self.is_last:
            self._results[fwd_chunk_id] = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in outputs]
            outputs, grads = self.run.roots(outputs, fwd_chunk_id)
            self._grads[fwd_chunk_id] = tuple(grads)
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


def schedule_for(
    stages: Stages, plan: Plan, num_micro_batches: int, device: torch.device
) -> tuple[Any, list[_ScheduledStage]]:
    """Returns the plan's schedule for so many micro-batches, and its view of this worker's stages."""
    if num_micro_batches not in stages.schedules:
        adapters = [_ScheduledStage(stage, stages, device) for stage in stages.local.values()]
        kind = _kind_for(plan, num_micro_batches)
        single = kind in (ScheduleGPipe, Schedule1F1B)
        schedule = kind(adapters[0] if single else adapters, num_micro_batches, loss_fn=_no_loss, scale_grads=False)
        stages.schedules[num_micro_batches] = (schedule, adapters)
    return stages.schedules[num_micro_batches]


def _kind_for(plan: Plan, num_micro_batches: int) -> type:
    """Returns the schedule's class. See [Note: small batches]."""
    rounds = max(1, num_micro_batches // plan.pipeline)
    if plan.schedule == "1f1b" and num_micro_batches >= plan.pipeline:
        return Schedule1F1B
    if plan.schedule == "interleaved" and num_micro_batches % rounds == 0:
        return ScheduleInterleaved1F1B
    if plan.schedule == "zero_bubble" and num_micro_batches % rounds == 0:
        return ScheduleInterleavedZeroBubble
    return ScheduleGPipe if plan.stages_per_device == 1 else ScheduleLoopedBFS


def _no_loss(output: Any, target: Any) -> Tensor:
    """Tells schedules that there is a backward; the gradients of the results are given, not derived from a loss."""
    return torch.zeros(())
