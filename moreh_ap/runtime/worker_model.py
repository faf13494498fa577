"""A worker's part of a model, and of each call of it: what to run, on which rows, and what to answer.

The mathematics is the parallelizer's; this module translates between messages and it.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from moreh_ap.errors import UnsupportedError
from moreh_ap.integrations import transformers_worker
from moreh_ap.parallelizer.apply import apply_plan, set_requires_grad, settle
from moreh_ap.parallelizer.batch import carries_rows, num_rows, row_range, slice_rows
from moreh_ap.parallelizer.forward import Call, ForwardPass
from moreh_ap.parallelizer.loading import TensorSource, fill, full_tensor, write_tensor
from moreh_ap.parallelizer.mesh import build_mesh
from moreh_ap.parallelizer.micro_batches import DeferredForward
from moreh_ap.parallelizer.proof import SplitProof, prove_split
from moreh_ap.parallelizer.run import run_forward
from moreh_ap.plan import Plan
from moreh_ap.runtime.messages import (
    BuildModel,
    DefineSignature,
    Forward,
    ForwardReply,
    LeafReply,
    StateRef,
    TensorData,
    TensorSlot,
)
from moreh_ap.runtime.nesting import pickle_treespec, unpickle_treespec
from moreh_ap.runtime.skeleton import unpickle_skeleton
from moreh_ap.runtime.worker_device import WorkerDevice

_MAX_INLINE_BYTES = 16 * 1024  # a loss travels with the answer; logits stay until somebody reads them


class WorkerModel:
    """One model under its plan, this worker's shards filled."""

    def __init__(self, command: BuildModel, device: WorkerDevice) -> None:
        self.device, self.plan = device, Plan.parse(command.plan)
        self.module = unpickle_skeleton(command.skeleton, device.torch_device)
        self.meta_module = (
            unpickle_skeleton(command.skeleton, device.torch_device) if self.plan.micro_batches > 1 else None
        )
        transformers_worker.complete_unpickled(self.module)
        self._modules = list(self.module.modules())
        apply_plan(self.module, self.plan, build_mesh(self.plan, device.torch_device.type))
        fill(
            self.module, {name: TensorSource(*source) for name, source in command.sources.items()}, device.torch_device
        )
        # The objects stay the same from here on: FSDP2 puts others in their place only during a call.
        self.settle()
        self._parameters = dict(self.module.named_parameters())
        self._proofs: dict[Any, SplitProof] = {}
        self._num_changes = 0  # a changed attribute may couple the rows

    # -- settings and state ----------------------------------------------------------------------------------------

    def change(self, changes: tuple[tuple[str, str, bytes], ...]) -> None:
        """Set attributes of submodules; ``config.name`` reaches into a transformers config."""
        self._num_changes += 1
        for path, name, pickled in changes:
            holder: Any = self.module.get_submodule(path)
            *through, last = name.split(".")
            for step in through:
                holder = getattr(holder, step)
            setattr(holder, last, pickle.loads(pickled))

    def set_training(self, flags: bytes) -> None:
        """Set the training mode of each submodule, in the order of ``modules()``."""
        for module, flag in zip(self._modules, flags):
            module.training = bool(flag)

    def set_requires_grad(self, flags: dict[str, bool]) -> None:
        """Freeze or unfreeze parameters."""
        self._num_changes += 1
        set_requires_grad(self.module, flags)

    def parameter(self, name: str) -> nn.Parameter:
        """This worker's part of a parameter, as the optimizer sees it."""
        return self._parameters[name]

    def settle(self) -> None:
        """Have the parts of parameters in place before they are read or written outside a call."""
        settle(self.module)

    def state(self, ref: StateRef) -> Tensor:
        """A parameter, a gradient or a buffer by its name.

        Raises:
            RuntimeError: If a gradient is read that is not there.
        """
        if ref.kind == "buffer":
            return self.module.get_buffer(ref.name)
        parameter = self._parameters[ref.name]
        if ref.kind == "param":
            return parameter
        if parameter.grad is None:
            raise RuntimeError(f"the gradient of {ref.name} was read, but it is None: it was cleared in the meantime")
        return parameter.grad

    def set_gradient(self, name: str, whole: Tensor) -> None:
        """Replace a gradient by this worker's part of `whole`."""
        parameter = self.parameter(name)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        write_tensor(parameter.grad, whole)

    def gradient_flags(self) -> bytes:
        """A byte for each parameter: whether it has a gradient."""
        return bytes(parameter.grad is not None for parameter in self._parameters.values())

    # -- calls -----------------------------------------------------------------------------------------------------

    def forward(
        self, signature: DefineSignature, command: Forward, tensors: list[Tensor], local: list[bool]
    ) -> WorkerCall:
        """Run the call on this worker's rows, or on the whole batch where it cannot be split."""
        if command.training is not None:
            self.set_training(command.training)
        module = self.module.get_submodule(signature.path)
        nesting = _Nesting(signature)
        rows = num_rows([tensor for tensor, is_local in zip(tensors, local) if not is_local])
        carried = [is_local or (rows is not None and carries_rows(t, rows)) for t, is_local in zip(tensors, local)]
        call = Call(
            self.module,
            "whole",
            self.device.torch_device,
            grad=command.grad,
            seed=command.seed,
            autocast=command.autocast_dtype,
            target=None if module is self.module else module,
        )
        proof = self._proof(call, signature, nesting, tensors, carried, rows)
        if proof.split and rows is not None:
            call = replace(call, mode="split", kinds=proof.kinds)
            start, stop = row_range(self.device.rank, self.device.world_size, rows)
            parts = slice_rows(tensors, rows, start, stop)
            tensors = [whole if is_local else part for whole, part, is_local in zip(tensors, parts, local)]
        tensors = [
            tensor.detach().requires_grad_() if wants else tensor for tensor, wants in zip(tensors, command.wants_grad)
        ]
        args, kwargs = nesting.fill(tensors)
        meta = None if self.meta_module is None else self.meta_module.get_submodule(signature.path)
        run = run_forward(call, args, kwargs, micro_batches=self.plan.micro_batches, rows=rows, meta_module=meta)
        return WorkerCall(self, run, proof, rows, _InputRoles(carried, command.wants_grad))

    def _proof(
        self,
        call: Call,
        signature: DefineSignature,
        nesting: _Nesting,
        tensors: list[Tensor],
        carried: list[bool],
        rows: int | None,
    ) -> SplitProof:
        """Whether calls like this one may be split; found out once for each kind of call."""
        world_size = self.device.world_size
        if world_size == 1 or rows is None or rows < world_size:
            return SplitProof(False, (), "the batch has fewer rows than there are devices" if world_size > 1 else "")
        kinds_of_input = tuple((tensor.dim(), tensor.dtype, rowed) for tensor, rowed in zip(tensors, carried))
        training = bytes(module.training for module in self._modules)
        settings = (signature.path, signature.pickled_treespec, signature.pickled_constants, self._num_changes)
        key = (settings, kinds_of_input, training, call.grad, call.autocast)
        if key not in self._proofs:
            args, kwargs = nesting.fill(tensors)
            self._proofs[key] = prove_split(call, args, kwargs, rows)
        return self._proofs[key]


class _Nesting:
    """How the leaves of a call nest, with its constants in place."""

    def __init__(self, signature: DefineSignature) -> None:
        self._constants: list[Any] = pickle.loads(signature.pickled_constants)
        self._treespec: TreeSpec = unpickle_treespec(signature.pickled_treespec)

    def fill(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with `tensors` as the tensor leaves."""
        values = iter(tensors)
        leaves = [next(values) if isinstance(leaf, TensorSlot) else leaf for leaf in self._constants]
        args, kwargs = tree_unflatten(leaves, self._treespec)
        return args, kwargs


class _InputRoles(NamedTuple):
    """For each tensor input: whether it was cut into rows, and whether its gradient is wanted."""

    carried: list[bool]
    wants_grad: tuple[bool, ...]


class WorkerCall:
    """One forward pass of this worker, kept until the controller no longer needs it."""

    def __init__(
        self,
        model: WorkerModel,
        run: ForwardPass | DeferredForward,
        proof: SplitProof,
        rows: int | None,
        inputs: _InputRoles,
    ) -> None:
        self.model, self._run, self._proof = model, run, proof
        self._rows, self._inputs = rows, inputs
        self._input_gradients: dict[int, Tensor | None] = {}

    def reply(self) -> ForwardReply:
        """What the controller is told at once: the nesting, every shape, and small values that are there."""
        leaves = tuple(self.leaf(index, with_data=False) for index in range(len(self._run.shapes)))
        note = "" if self._proof.split else self._proof.reason
        mode = "split" if self._proof.split else "whole"
        return ForwardReply(pickle_treespec(self._run.treespec), leaves, mode, note)

    def output(self, index: int) -> Tensor:
        """This worker's part of an output."""
        value: Tensor = self._run.outputs[index]
        return value

    def leaf(self, index: int, *, with_data: bool) -> LeafReply:
        """One output; its bytes if asked for, or if they are few and there without computing."""
        shape = self._run.shapes[index]
        if not isinstance(shape, Tensor):
            return LeafReply("const", (), None, False, _pickle_constant(shape))
        kind = self._proof.kinds[index] if self._proof.split else "same"
        few = self._run.computed and shape.numel() * shape.element_size() <= _MAX_INLINE_BYTES
        data = None
        if with_data or few:
            sends = kind != "same" or self.model.device.rank == 0
            data = TensorData.of(full_tensor(self._run.outputs[index])).data if sends else b""
        return LeafReply(kind, tuple(shape.shape), shape.dtype, self._run.differentiable[index], data)

    def backward(self, gradients: list[Tensor | None], retain_graph: bool) -> None:
        """Backpropagate; `gradients` are whole, this worker takes its rows of them."""
        local: list[Tensor | None] = []
        whole = iter(gradients)
        for index, shape in enumerate(self._run.shapes):
            gradient = next(whole) if isinstance(shape, Tensor) else None
            if gradient is not None and self._proof.split and self._proof.kinds[index] == "rows":
                gradient = self._own_rows(gradient)
            local.append(gradient)
        answered = iter(self._run.backward(local, retain_graph=retain_graph))
        self._input_gradients = {
            index: next(answered) for index, wanted in enumerate(self._inputs.wants_grad) if wanted
        }

    def _own_rows(self, gradient: Tensor) -> Tensor:
        # An output may have several entries a row, one after the other: (batch x positions, ...).
        assert self._rows is not None
        device, entries = self.model.device, gradient.shape[0] // self._rows
        start, stop = row_range(device.rank, device.world_size, self._rows)
        return gradient[start * entries : stop * entries]

    def input_gradient(self, index: int) -> LeafReply:
        """The gradient of tensor input `index`: rows where it was cut, else this worker's share of the sum.

        Raises:
            UnsupportedError: If no output depends on the input.
        """
        gradient = self._input_gradients[index]
        if gradient is None:
            raise UnsupportedError(
                f"input tensor {index} of a call got no gradient", "inputs that the call's outputs depend on"
            )
        kind = "same"
        if self._proof.split:
            kind = "rows" if self._inputs.carried[index] else "share"
        return LeafReply(kind, tuple(gradient.shape), gradient.dtype, False, TensorData.of(gradient.cpu()).data)


def _pickle_constant(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return cloudpickle.dumps(value)
