"""What one worker does with each command: a table from command to method, and the state the commands refer to.

Runs in the worker process, in the thread that also runs its collectives. All workers execute the same commands in the
same order. It must not know the engine that delivers commands, nor the controller that sends them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._pytree import tree_leaves, tree_map_only

from moreh_ap.parallelizer.call.own_collectives import seeing_group
from moreh_ap.parallelizer.data.norms import total_norm
from moreh_ap.parallelizer.state.checkpoint_shards import WrittenFile, boxes_of, problem_with, write_file
from moreh_ap.parallelizer.state.loading import Wanted, read
from moreh_ap.parallelizer.state.state_shard import Held
from moreh_ap.protocol.messages.calls import (
    Backward,
    DefineSignature,
    Differentiate,
    Forward,
    ForwardReply,
    ReadInputGradients,
    ReadOutputGradient,
    ReadOutputs,
    ReadsAttributes,
    ReleaseCalls,
    TakeGradients,
)
from moreh_ap.protocol.messages.checkpoints import CheckFiles, ReadCheckpoint, WriteCheckpoint
from moreh_ap.protocol.messages.devices import (
    DescribeDevice,
    DeviceInfo,
    DeviceRates,
    ProbeDevice,
    ReportMemory,
    ReportSteps,
    StepReport,
)
from moreh_ap.protocol.messages.models import BuildModel, ChangeModule, ReleaseModel, SetKernelFormats, SetRequiresGrad
from moreh_ap.protocol.messages.optimizers import BuildOptimizer, DescribeOptimizer, LoadOptimizer, StepOptimizer
from moreh_ap.protocol.messages.row_shards import ReadPart, ReleaseParts, RunOnParts, WritePart
from moreh_ap.protocol.messages.state import (
    ClearGradients,
    ClipGradients,
    GradientNorm,
    KeepState,
    ReadState,
    ReleaseState,
    RunOperation,
    WriteState,
)
from moreh_ap.protocol.messages.stream import Batch, DefineList, ImportModules, Synchronize
from moreh_ap.protocol.messages.tensors import LeafReply, OutputRef, PartRef, StateRef, TensorData
from moreh_ap.runtime.worker import device_probe, patches
from moreh_ap.runtime.worker.row_shard_store import Part, answer, run_on_parts
from moreh_ap.runtime.worker.step_clock import StepClock
from moreh_ap.runtime.worker.worker_call import WorkerCall
from moreh_ap.runtime.worker.worker_device import WorkerDevice
from moreh_ap.runtime.worker.worker_model import WorkerModel
from moreh_ap.runtime.worker.worker_optimizer import WorkerOptimizer

_TOUCHES_PARAMETERS = (
    ReadState,
    WriteState,
    ReadCheckpoint,
    WriteCheckpoint,
    RunOperation,
    StepOptimizer,
)


class WorkerExecutor:
    """Executes commands on one device.

    Args:
        rank: This worker's number.
        world_size: How many workers there are.
        device_type: "cpu" or "cuda".
    """

    def __init__(self, rank: int, world_size: int, device_type: str) -> None:
        self._patches = patches.install()
        self._rank, self._world_size = rank, world_size
        self._device = WorkerDevice(rank, world_size, device_type)
        self._clock = StepClock(self._device.is_cuda)
        self._models: dict[str, WorkerModel] = {}
        self._calls: dict[int, WorkerCall] = {}
        self._parts: dict[int, Part | None] = {}
        self._optimizers: dict[str, WorkerOptimizer] = {}
        self._temporaries: dict[StateRef, Held | None] = {}
        self._signatures: dict[int, DefineSignature] = {}
        self._lists: dict[int, tuple[StateRef, ...]] = {}

    def execute(self, command: Any) -> Any:
        """Execute one command and return its answer.

        Raises:
            Exception: Whatever the user's model or PyTorch raises.
        """
        if isinstance(command, _TOUCHES_PARAMETERS):
            for model in self._models.values():
                model.settle()
        return self._execute(command)

    @functools.singledispatchmethod
    def _execute(self, command: Any) -> Any:
        raise TypeError(f"unknown command {type(command).__name__}")

    @_execute.register
    def _(self, command: Batch) -> list[Any]:
        return [self.execute(part) for part in command.commands]

    # -- models and calls ------------------------------------------------------------------------------------------

    @_execute.register
    def _(self, command: ImportModules) -> None:
        for name in command.names:
            with contextlib.suppress(ImportError):  # a hint: building the model will say what is missing
                importlib.import_module(name)

    @_execute.register
    def _(self, command: BuildModel) -> dict[str, str]:
        self._models.pop(command.owner, None)  # where it is laid out again
        self._models[command.owner] = model = WorkerModel(command, self._device)
        self._clock.restart()
        return model.placements()

    @_execute.register
    def _(self, command: ReleaseModel) -> None:
        self._models.pop(command.owner, None)
        gc.collect()

    @_execute.register
    def _(self, command: ChangeModule) -> None:
        self._models[command.owner].change(command.changes)

    @_execute.register
    def _(self, command: SetRequiresGrad) -> None:
        self._models[command.owner].set_requires_grad(command.requires_grad)

    @_execute.register
    def _(self, command: SetKernelFormats) -> None:
        self._models[command.owner].set_kernel_formats(command.formats)

    @_execute.register
    def _(self, command: DefineSignature) -> None:
        self._signatures[command.signature] = command

    @_execute.register
    def _(self, command: Forward) -> ForwardReply | ReadsAttributes | None:
        if command.grad:
            self._clock.forward_begins()
        signature = self._signatures[command.signature]
        tensors = [self._argument(data) for data in command.tensors]
        local = [isinstance(data, OutputRef) for data in command.tensors]
        call = self._models[signature.owner].forward(signature, command, tensors, local)
        if isinstance(call, ReadsAttributes):
            return call
        self._calls[command.call_id] = call
        return call.reply()

    def _argument(self, data: TensorData | OutputRef | StateRef) -> Tensor:
        if isinstance(data, OutputRef):
            return self._calls[data.call_id].own_rows(data.index).detach()
        if isinstance(data, StateRef):
            held = self._state(data)
            assert held is not None  # the controller names only tensors that every worker holds
            return held.whole().to(self._device.torch_device)
        return self._device.place(data)

    @_execute.register
    def _(self, command: ReadOutputs) -> list[LeafReply | None]:
        call = self._calls[command.call_id]
        return [call.leaf(index) for index in command.indices]

    @_execute.register
    def _(self, command: Backward) -> bytes:
        self._clock.backward_begins()
        call = self._calls[command.call_id]
        if command.training is not None:
            call.model.set_training(command.training)
        call.model.put_gradients_aside(command.separate)
        gradients = [self._gradient(data) for data in command.gradients]
        call.backward(gradients, command.retain_graph, command.watched)
        return call.model.gradient_flags() + call.input_gradient_flags()

    @_execute.register
    def _(self, command: Differentiate) -> ForwardReply | None:
        self._clock.backward_begins()
        source = self._calls[command.of]
        if command.training is not None:
            source.model.set_training(command.training)
        call = source.differentiate(command, [self._gradient(data) for data in command.gradients])
        self._calls[command.call_id] = call
        return call.reply()

    def _gradient(self, data: TensorData | PartRef | None) -> Tensor | Part | None:
        if isinstance(data, PartRef):
            return self._parts[data.number]
        return None if data is None else self._device.place(data)

    @_execute.register
    def _(self, command: TakeGradients) -> None:
        model = self._models[command.owner]
        for name, ref in command.gradients.items():
            self._temporaries[ref] = model.state(StateRef(command.owner, "grad", name))
        model.put_gradients_aside(False)

    @_execute.register
    def _(self, command: ReadOutputGradient) -> LeafReply | None:
        return self._calls[command.call_id].output_gradient(command.index)

    @_execute.register
    def _(self, command: ReadInputGradients) -> LeafReply | None:
        return self._calls[command.call_id].input_gradient(command.index)

    @_execute.register
    def _(self, command: ReleaseCalls) -> None:
        for call_id in command.call_ids:
            self._calls.pop(call_id, None)

    # -- parts of large tensors --------------------------------------------------------------------------------------

    def _part(self, ref: PartRef | OutputRef) -> Part | None:
        if isinstance(ref, PartRef):
            return self._parts[ref.number]
        return self._calls[ref.call_id].part(ref.index)

    @_execute.register
    def _(self, command: RunOnParts) -> list[LeafReply | None] | None:
        results = run_on_parts(command, self._part, self._device.place)
        if results is None:
            self._parts.update(dict.fromkeys(command.outputs))
            return None
        self._parts.update(zip(command.outputs, results))
        return answer(results) if results and results[0].answers else None

    @_execute.register
    def _(self, command: ReadPart) -> LeafReply | None:
        part = self._parts[command.number]
        return None if part is None else part.reply()

    @_execute.register
    def _(self, command: WritePart) -> None:
        part = self._parts[command.number]
        if part is not None:
            part.write(self._device.place(command.whole))

    @_execute.register
    def _(self, command: ReleaseParts) -> None:
        for number in command.numbers:
            self._parts.pop(number, None)

    # -- state tensors ---------------------------------------------------------------------------------------------

    def _state(self, ref: StateRef, *, fetch: bool = True) -> Held | None:
        """This worker's part of a tensor, on the device if `fetch`; None if other workers alone hold it."""
        if ref in self._temporaries:
            return self._temporaries[ref]
        if ref.owner in self._models:
            return self._models[ref.owner].state(ref)
        return self._optimizers[ref.owner].state(int(ref.kind), ref.name, fetch=fetch)

    @_execute.register
    def _(self, command: ReadState) -> list[TensorData | None]:
        wholes = []
        for ref in command.refs:
            held = self._state(ref)
            whole = None if held is None else held.whole()
            wholes.append(TensorData.of(whole) if whole is not None and held is not None and held.sends else None)
        return wholes

    @_execute.register
    def _(self, command: WriteState) -> None:
        for ref, data in command.values.items():
            if ref.kind == "grad":
                self._models[ref.owner].set_gradient(ref.name, data.tensor())
                continue
            held = self._state(ref)
            if held is None:
                continue
            # Batch normalisation changes its statistics without telling autograd, wherever it is computed.
            is_buffer = ref.kind == "buffer"
            unnoticed = torch.autograd._unsafe_preserve_version_counter(held.tensor) if is_buffer else nullcontext()
            with unnoticed:
                held.write(data.tensor())

    @_execute.register
    def _(self, command: ReleaseState) -> None:
        for ref in command.refs:
            self._temporaries.pop(ref, None)

    @_execute.register
    def _(self, command: KeepState) -> None:
        self._temporaries[command.output] = self._state(command.ref)

    @_execute.register
    def _(self, command: DefineList) -> None:
        self._lists[command.list_id] = command.refs

    @_execute.register
    def _(self, command: ClearGradients) -> None:
        for ref in self._lists[command.gradients]:
            self._models[ref.owner].clear_gradient(ref.name)

    @_execute.register
    def _(self, command: RunOperation) -> None:
        packet, overload = command.func.rsplit(".", 1)
        func = getattr(getattr(torch.ops.aten, packet.split("::")[-1]), overload)
        refs = tree_leaves((command.arguments, command.keyword_arguments), is_leaf=_is_ref)
        operands = [self._state(ref) for ref in refs if _is_ref(ref)]
        if any(held is None for held in operands):
            self._temporaries.update(dict.fromkeys(command.outputs))
            return
        arguments = tree_map_only(
            (StateRef, TensorData), self._operand, (command.arguments, command.keyword_arguments), is_leaf=_is_ref
        )
        if func._schema.is_mutable and not any(isinstance(leaf, DTensor) for leaf in tree_leaves(arguments[0][:1])):
            arguments = tree_map_only(DTensor, DTensor.full_tensor, arguments)  # what is written is whole
        # What is no shard is the same on every worker. DTensor's convolution asks for its rank by the public name.
        with torch.no_grad(), implicit_replication(), seeing_group():
            result = func(*arguments[0], **arguments[1])
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        source = next((held for held in operands if held is not None), None)
        assert source is not None
        self._temporaries.update((ref, source.like(tensor)) for ref, tensor in zip(command.outputs, outputs))

    def _operand(self, data: StateRef | TensorData) -> Tensor:
        if isinstance(data, TensorData):
            return self._device.place(data)
        held = self._state(data)
        assert held is not None
        return held.tensor

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @_execute.register
    def _(self, command: ReadCheckpoint) -> None:
        wanted: list[Wanted] = []
        for ref, saved in command.values.items():
            held = self._state(ref)
            if held is not None:
                wanted += (Wanted(ref.name, held.tensor, source, held.layout) for source in saved.sources)
        read(wanted)

    @_execute.register
    def _(self, command: WriteCheckpoint) -> WrittenFile | None:
        self._device.synchronize()  # copies to host memory may be on their way
        boxes = boxes_of({name: self._state(ref, fetch=False) for name, ref in command.tensors.items()})
        return write_file(f"{command.path}{self._rank}.safetensors", boxes)

    @_execute.register
    def _(self, command: CheckFiles) -> dict[str, str]:
        own = command.files[self._rank :: self._world_size]
        found = {path: problem_with(path, num_bytes, sha256) for path, num_bytes, sha256 in own}
        return {path: problem for path, problem in found.items() if problem}

    # -- optimizers ------------------------------------------------------------------------------------------------

    @_execute.register
    def _(self, command: BuildOptimizer) -> None:
        groups = [[self._models[ref.owner].parameter(ref.name) for ref in group] for group in command.groups]
        owners = {ref.owner for group in command.groups for ref in group}
        offload = any(self._models[owner].plan.offload == "optimizer" for owner in owners)
        self._optimizers[command.owner] = WorkerOptimizer(command, groups, self._device, offload=offload)

    @_execute.register
    def _(self, command: StepOptimizer) -> None:
        self._optimizers[command.owner].step(command.changes)
        self._clock.step_ended()

    @_execute.register
    def _(self, command: DescribeOptimizer) -> dict[int, dict[str, Any]]:
        return self._optimizers[command.owner].describe()

    @_execute.register
    def _(self, command: LoadOptimizer) -> None:
        self._optimizers[command.owner].load(command.state)

    @_execute.register
    def _(self, command: GradientNorm) -> None:
        parts = self._present(command.tensors)
        norm = total_norm([part.local for part in parts if part.counts], command.norm_type, self._device.torch_device)
        model = self._models.get(self._lists[command.tensors][0].owner)  # of which this stage may have no part
        self._temporaries[command.output] = Held(norm, parts[0].position if model is None else model.applied.position)

    @_execute.register
    def _(self, command: ClipGradients) -> None:
        # As torch.nn.utils.clip_grad_norm_ does it, with 1e-6 against a division by zero.
        norm = self._state(command.total_norm)
        assert norm is not None
        scale = (command.max_norm / (norm.tensor + 1e-6)).clamp(max=1.0)
        for held in self._present(command.tensors):
            held.local.mul_(scale)

    def _present(self, tensors: int) -> list[Held]:
        """This worker's parts of the tensors in a list, without gradients that were expected and are not there."""
        expected = self._lists[tensors]
        refs = [ref for ref in expected if ref.kind != "grad" or self._models[ref.owner].has_gradient(ref.name)]
        return [held for held in map(self._state, refs) if held is not None]

    # -- the device ------------------------------------------------------------------------------------------------

    @_execute.register
    def _(self, command: DescribeDevice) -> DeviceInfo:
        return self._device.describe()

    @_execute.register
    def _(self, command: ProbeDevice) -> DeviceRates:
        return device_probe.measure(self._device.torch_device, command.bf16)

    @_execute.register
    def _(self, command: ReportSteps) -> StepReport:
        return StepReport(self._clock.seconds(), self._device.peak_reserved_bytes())

    @_execute.register
    def _(self, command: ReportMemory) -> dict[str, int]:
        return self._device.memory(command)

    @_execute.register
    def _(self, command: Synchronize) -> None:
        self._device.synchronize()


def _is_ref(node: Any) -> bool:
    return isinstance(node, StateRef)
