"""Forward and backward of a call through the stages of a pipeline.

Decides what travels between stages, and when a stage runs which micro-batch; the order itself is PyTorch's schedules'.
Must not know how a model was cut (`stages.py`), nor what a loss is.

[Note: two ways to run]
`PipelinedPass` runs forward at once and keeps its graph for a backward: what comes before each stage is waited for, so
one stage computes at a time. It serves where the result is needed before a backward is known: the split check,
and a loss that the script reads early. `PipelinedForward` waits for `backward` and then runs the plan's schedule.

[Note: who has the result]
The workers with the last stage. On all others `outputs` is empty and `has_result` False.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.execution import Execution, repeats_in
from moreh_ap.parallelizer.call.followed_forwards import FollowedForwards
from moreh_ap.parallelizer.call.forward import autocasting, reducing, scaled_gradient, summing_gradients
from moreh_ap.parallelizer.call.micro_batches import MicroBatchedForward
from moreh_ap.parallelizer.data.bucketed_allreduce import gradient_sync_of
from moreh_ap.parallelizer.data.fsdp import compute_dtype, recover, settle
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.loss.meta_reduction import MetaReduction
from moreh_ap.parallelizer.pipeline.stage import Nesting, Stage, nesting_of
from moreh_ap.parallelizer.pipeline.stage_transfers import receive, receive_header, send, send_failure
from moreh_ap.parallelizer.pipeline.stages import Stages, stages_of
from moreh_ap.parallelizer.precision.output_precision import shapes_of
from moreh_ap.plan import Plan
from moreh_ap.protocol.pytree import flatten

if TYPE_CHECKING:
    from moreh_ap.parallelizer.pipeline.schedules import Border


class PipelinedPass(Execution):
    """A forward that has run through all stages, and its backward. See [Note: two ways to run].

    No attribute is answered: each worker has parts of the model.
    """

    runs_in_stages = True
    outputs: Sequence[Any] = ()

    def __init__(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        reduction: AbstractContextManager[Any] | None = None,
        micro_batch: int = 0,
    ) -> None:
        stages = _stages(call.module)
        self.call, self._stages = call, stages
        self._ran: list[tuple[Stage, list[Tensor], list[Tensor]]] = []  # stage, received, returned
        self.has_result = stages.axis.rank == stages.last_worker
        self._results: list[Any] = []
        settle(call.module)
        failure: Exception | None = None
        try:
            with torch.set_grad_enabled(call.grad), reduction or reducing(call), autocasting(call):
                for number, stage in stages.local.items():
                    try:
                        self._run(number, stage, args, dict(kwargs), micro_batch, failure is not None)
                    except Exception as error:  # stages that wait for this one are told
                        failure = failure or error
                        if not stage.is_last:
                            send_failure(stages.axis, (number + 1) % stages.axis.size, failure)
                if failure is not None:
                    raise failure
        except BaseException:
            recover(call.module)
            raise
        if not call.grad:
            settle(call.module)
        self.shapes = shapes_of(self._results, self.outputs)
        self.kinds = call.kinds or ("same",) * len(self.outputs)
        self.differentiable = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in self._results]

    def _run(
        self,
        number: int,
        stage: Stage,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        micro_batch: int,
        has_failed: bool,
    ) -> None:
        axis = self._stages.axis
        received, nesting = ([], None) if number == 0 else receive(axis, (number - 1) % axis.size, self.call.device)
        assert not has_failed, "an earlier stage, and so those between it and this one"
        self.call.random.begin(self.call.device, micro_batch, number)
        result = stage(tuple(received), nesting, args, kwargs)
        if stage.is_last:
            self._results, self.treespec = flatten(result)
            self.repeats = repeats_in(self._results)
            self.outputs = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self._results]
            self._ran.append((stage, received, []))
            return
        self._ran.append((stage, received, list(result)))
        send(axis, (number + 1) % axis.size, list(result), stage.nesting)

    def backward(self, output_grads: Sequence[Tensor | None], retain_graph: bool = False) -> list[Tensor | None]:
        with summing_gradients(self.call):
            return self.accumulate(output_grads, retain_graph)

    def accumulate(self, output_grads: Sequence[Tensor | None], retain_graph: bool = False) -> list[Tensor | None]:
        """Adds to this worker's gradients; sums over workers are left to the caller.

        Args:
            output_grads: One gradient or None for each leaf of `outputs`; ignored where there is no result.
            retain_graph: Whether another backward may follow.
        """
        failure: Exception | None = None
        try:
            for stage, received, returned in reversed(self._ran):
                wanted = [leaf for leaf in received if leaf.requires_grad]
                try:
                    self._go_back(stage, wanted, [t for t in returned if t.requires_grad], output_grads, retain_graph)
                except Exception as error:  # stages that wait for this one are told
                    failure = failure or error
                    if wanted:
                        send_failure(self._stages.axis, (stage.index - 1) % self._stages.axis.size, failure)
            if failure is not None:
                raise failure
        except BaseException:
            recover(self.call.module)
            raise
        return []

    def _go_back(
        self,
        stage: Stage,
        wanted: list[Tensor],
        returned: list[Tensor],
        output_grads: Sequence[Tensor | None],
        retain_graph: bool,
    ) -> None:
        """Runs the backward of one stage: its gradients come from the next, those of `wanted` go to the one before."""
        axis = self._stages.axis
        if stage.is_last:
            roots, grads = _roots(self, self._results, output_grads)
        else:
            roots, grads = returned, [torch.empty_like(t) for t in returned]
            if grads:
                receive_header(axis, (stage.index + 1) % axis.size)
            for grad in grads:
                dist.recv(grad, group=axis.group, group_src=(stage.index + 1) % axis.size)
        if roots:
            torch.autograd.backward(roots, grads, retain_graph=retain_graph)
        if wanted:
            dist.send_object_list([None], group=axis.group, group_dst=(stage.index - 1) % axis.size)
        for leaf in wanted:
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
            leaf.grad = None
            dist.send(grad, group=axis.group, group_dst=(stage.index - 1) % axis.size)


@dataclass(frozen=True)
class _Noted:
    """What is noted of a forward that is followed without values.

    Attributes:
        borders: By stage, what it returns for the whole slice.
        block_sites: For each block the means that are taken inside.
    """

    borders: dict[int, tuple[Nesting, list[Border]]]
    block_sites: list[range]


class PipelinedForward(MicroBatchedForward):
    """A forward that waits for its backward and then runs the plan's schedule. See [Note: two ways to run]."""

    runs_in_stages = True

    def __init__(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_micro_batches: int,
        rows: int,
        known: FollowedForwards,
        plan: Plan,
    ) -> None:
        self._stages = _stages(call.module)
        self._plan = plan
        self.has_result = self._stages.axis.rank == self._stages.last_worker
        self._given_gradients: list[list[Tensor | None]] = []
        if call.target is not None:
            raise UnsupportedError(
                "a pipeline trains the model as a whole, and a part of it was called with gradients",
                "calls of the model itself, calls of parts under torch.no_grad(), or plans with pipeline=1",
                'plan="shard=2"',
            )
        super().__init__(call, args, kwargs, num_micro_batches, rows, known)
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

    def _compute_outputs(self) -> list[list[Any]]:
        call = replace(self.call, grad=False)
        micro_batches = []
        for micro_batch in range(self._num_micro_batches):
            args, kwargs = self._arguments_of(micro_batch)
            reduction = self._reduction_of(self._stages.local)
            micro_batches.append(
                list(PipelinedPass(call, args, kwargs, reduction=reduction, micro_batch=micro_batch).outputs)
            )
        return micro_batches

    def _draw(self) -> None:
        raise UnsupportedError(
            "forward draws from Python's random or from NumPy, and each stage of a pipeline would draw others",
            "random numbers of torch, or plans with pipeline=1",
            'plan="shard=2"',
        )

    def backward(self, output_grads: Sequence[Tensor | None], retain_graph: bool = False) -> list[Tensor | None]:
        """Runs the schedule. A second call computes everything once more, so `retain_graph` needs nothing."""
        self._given_gradients = [
            self._gradients_of(output_grads, micro_batch) for micro_batch in range(self._num_micro_batches)
        ]
        settle(self.call.module)
        from moreh_ap.parallelizer.pipeline.schedules import schedule_for

        schedule, adapters = schedule_for(self._stages, self._plan, self._num_micro_batches, self.call.device)
        micro_batches: list[Any] = [[] for _ in range(self._num_micro_batches)]
        for adapter in adapters:
            adapter.begin(self, micro_batches)
        numbers = list(range(self._num_micro_batches))
        try:
            with self._stages.sums_shared_gradients(), summing_gradients(self.call):
                schedule._step_microbatches(target_mbs=numbers)
        except BaseException:
            recover(self.call.module)
            raise
        finally:
            for adapter in adapters:
                adapter.end()
        self._given_gradients = []
        settle(self.call.module)
        self._set_outputs(micro_batches)
        return []

    # -- what a stage asks ------------------------------------------------------------------------------------------

    def run_stage(self, stage: Stage, micro_batch: int, received: tuple[Tensor, ...]) -> list[Any]:
        """Returns what a stage makes of one micro-batch: tensors for the next stage, on the last one the results."""
        args, kwargs = self._arguments_of(micro_batch)
        self.call.random.begin(self.call.device, micro_batch, stage.index)
        with torch.enable_grad(), self._reduction_of([stage.index]), autocasting(self.call):
            nesting = None if stage.index == 0 else self._borders[stage.index - 1][0]
            result = stage(received, nesting, args, kwargs)
        if stage.is_last:
            return flatten(result)[0]
        specs = self.border(stage.index, micro_batch)
        return [leaf.to(dtype) for leaf, (_, dtype) in zip(result, specs, strict=True)]

    def border(self, stage: int, micro_batch: int) -> list[Border]:
        """Returns shapes and dtypes of what a stage returns for one micro-batch."""
        start, stop = self._rows_of(micro_batch)
        computed = compute_dtype(self.call.module)
        found = []
        for shape, dtype in self._borders[stage][1]:
            if shape and shape[0] == self._rows:
                shape = (stop - start, *shape[1:])
            dtype = computed if computed is not None and dtype.is_floating_point else dtype
            found.append((shape, dtype))
        return found

    def roots(self, results: list[Any], micro_batch: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the results of a micro-batch that have gradients, with these."""
        return _roots(self, results, self._given_gradients[micro_batch])

    def keeps_gradients_here(self) -> AbstractContextManager[None]:
        """Inside, what backward adds to gradients is not summed over workers yet."""
        sync = gradient_sync_of(self.call.module)
        return nullcontext() if sync is None else sync.local()

    # -- before anything runs ----------------------------------------------------------------------------------------

    @contextmanager
    def _observed(self, meta_module: nn.Module, reduction: MetaReduction) -> Iterator[_Noted]:
        """Notes what stages return, and which means are taken inside which block."""
        stages, noted = self._stages, _Noted({}, [])
        some_stage = next(iter(stages.local.values()))
        ends = {own.stop - 1: stage for stage, own in enumerate(stages.ranges)}

        def begin(block: nn.Module, args: Any) -> None:
            noted.block_sites.append(range(len(reduction.local_denominators), 0))

        def end(block: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            number = len(noted.block_sites) - 1
            noted.block_sites[number] = range(noted.block_sites[number].start, len(reduction.local_denominators))
            if number in ends:
                leaves, spec = tree_flatten(result)
                given = tree_flatten((args, kwargs))[0]
                travelling = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
                travelling += [given[number] for number in stages.carried]
                specs = [(some_stage.local_shape(leaf), leaf.dtype) for leaf in travelling]
                lengths = map(some_stage.split_length, travelling)
                noted.borders[ends[number]] = (nesting_of(leaves, spec, lengths), specs)

        with ExitStack() as hooks:
            for block in meta_module.get_submodule(stages.body).children():
                hooks.callback(block.register_forward_pre_hook(begin).remove)
                hooks.callback(block.register_forward_hook(end, with_kwargs=True).remove)
            yield noted

    def _recall(self, noted: _Noted) -> None:
        self._borders, self._block_sites = noted.borders, noted.block_sites

    def _run_without_gradients(self) -> NoReturn:
        raise UnsupportedError(
            f"a pipeline needs a forward that can be followed without values, {type(self.call.module).__name__}'s "
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
        if self.call.mode != "split":
            return reducing(self.call)
        own = [self._denominators[site] for stage in stages for site in self._sites_of(stage)]
        call = self.call
        return GlobalReduction(call.device, axis=call.axis, denominators=own, rules=call.rules)


def _stages(module: nn.Module) -> Stages:
    found = stages_of(module)
    assert found is not None
    return found


def _roots(
    execution: Execution, results: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    call, kinds = execution.call, execution.kinds
    roots, given = [], []
    for index, (result, grad) in enumerate(zip(results, grads, strict=True)):
        if grad is not None and isinstance(result, Tensor) and result.requires_grad:
            roots.append(result)
            given.append(scaled_gradient(call, kinds[index], result, grad))
    return roots, given
