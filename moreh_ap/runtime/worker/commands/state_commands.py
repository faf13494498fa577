"""Commands that read, write and compute with parameters, gradients, buffers and optimizer states by their names."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._pytree import tree_leaves, tree_map_only

from moreh_ap.parallelizer.surroundings.own_collectives import seeing_group
from moreh_ap.protocol.messages.state import KeepState, ReadState, RunOperation, StoredTensor, WriteState
from moreh_ap.protocol.messages.tensors import StateRef, TensorData
from moreh_ap.runtime.worker.commands.operand_devices import on_one_device
from moreh_ap.runtime.worker.commands.stored_values import writing_to
from moreh_ap.runtime.worker.commands.tables import Handlers, Tables


class StateCommands:
    """Executes them."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def handlers(self) -> Handlers:
        """Returns what executes each command."""
        return {ReadState: self._read, WriteState: self._write, KeepState: self._keep, RunOperation: self._run}

    def _read(self, command: ReadState) -> list[TensorData | StoredTensor | None]:
        values: list[TensorData | StoredTensor | None] = []
        with writing_to(command.file, self._tables.rank) as write:
            for ref in command.refs:
                held = self._tables.state(ref)
                whole = None if held is None else held.whole_tensor()
                values.append(write(whole) if whole is not None and held is not None and held.is_sender else None)
        return values

    def _write(self, command: WriteState) -> None:
        for ref, data in command.values.items():
            if ref.kind == "grad":
                self._tables.models[ref.owner].set_gradient(ref.name, data.tensor())
                continue
            held = self._tables.state(ref)
            if held is None:
                continue
            # Batch normalisation changes its statistics without telling autograd, wherever it is computed.
            is_buffer = ref.kind == "buffer"
            unnoticed = torch.autograd._unsafe_preserve_version_counter(held.tensor) if is_buffer else nullcontext()
            with unnoticed:
                held.write(data.tensor())

    def _keep(self, command: KeepState) -> None:
        self._tables.temporaries[command.output] = self._tables.state(command.ref)

    def _run(self, command: RunOperation) -> None:
        temporaries = self._tables.temporaries
        packet, overload = command.func.rsplit(".", 1)
        func = getattr(getattr(torch.ops.aten, packet.split("::")[-1]), overload)
        refs = tree_leaves((command.arguments, command.keyword_arguments), is_leaf=_is_ref)
        operands = [self._tables.state(ref) for ref in refs if _is_ref(ref)]
        if any(held is None for held in operands):
            temporaries.update(dict.fromkeys(command.outputs))
            return
        arguments = tree_map_only(
            (StateRef, TensorData), self._operand, (command.arguments, command.keyword_arguments), is_leaf=_is_ref
        )
        if func._schema.is_mutable and not any(isinstance(leaf, DTensor) for leaf in tree_leaves(arguments[0][:1])):
            arguments = tree_map_only(DTensor, DTensor.full_tensor, arguments)  # what is written is whole
        if self._is_on_host():
            arguments = on_one_device(func, *arguments)
        # A tensor that is not sharded is the same on every worker. DTensor's convolution asks for its rank by the
        # public name, which answers for models.
        with torch.no_grad(), implicit_replication(), seeing_group():
            if packet == "_foreach_copy_":  # DTensor has no rule for it
                result = list(map(torch.ops.aten.copy_.default, *arguments[0][:2]))
            else:
                result = func(*arguments[0], **arguments[1])
            result = tree_map_only(DTensor, _summed_up, result)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        source = next((held for held in operands if held is not None), None)
        assert source is not None
        temporaries.update((ref, source.like(tensor)) for ref, tensor in zip(command.outputs, outputs))

    def _is_on_host(self) -> bool:
        """Whether states may be in host memory that operations find beside tensors on the device."""
        return self._tables.device.is_cuda and any(one.plan.offload == "all" for one in self._tables.models.values())

    def _operand(self, data: StateRef | TensorData) -> Tensor:
        if isinstance(data, TensorData):
            return self._tables.device.place(data)
        held = self._tables.state(data)
        assert held is not None
        return held.tensor


def _summed_up(tensor: DTensor) -> DTensor:
    """Returns the tensor; where each worker has a part of a sum or a norm, the whole one: no operation in place can
    change parts."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    return tensor.redistribute(placements=[Replicate() if one.is_partial() else one for one in tensor.placements])


def _is_ref(node: Any) -> bool:
    return isinstance(node, StateRef)
