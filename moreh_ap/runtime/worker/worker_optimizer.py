"""The optimizers of a worker: the user's class over this worker's shards, and the gradients that it steps by.

Decides which gradients a norm counts here, and how they are clipped and cleared. How a norm is taken over all workers
is for `norms.py` to know.

[Note: shards as ordinary parameters]
Nearly every optimizer that reaches a worker computes each element from the elements at the same place, so a step on a
shard is a step on its local tensor; of others `whole_steps.py` gathers the parameters. With FSDP2's DTensors, each
operation of a step would go through their dispatch, which takes longer than the operation where shards are small, and
knows no fused SGD. So the optimizer is built over ordinary parameters in the memory of the shards, which have the local
gradients while it steps, and its state is local, too. Whoever reads or writes state that is laid out like a sharded
parameter gets a DTensor around it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moreh_ap.parallelizer.data.norms import total_norm
from moreh_ap.parallelizer.data.whole_steps import WholeSteps
from moreh_ap.parallelizer.mesh import Position
from moreh_ap.parallelizer.state.entry_layouts import EntryLayouts
from moreh_ap.parallelizer.state.loading import Wanted, read
from moreh_ap.parallelizer.state.state_shard import StateShard
from moreh_ap.protocol.messages.optimizers import (
    BuildOptimizer,
    DescribeOptimizer,
    LoadOptimizer,
    ReleaseOptimizer,
    StepOptimizer,
)
from moreh_ap.protocol.messages.state import ClearGradients, ClipGradients, GradientNorm, UnscaleGradients
from moreh_ap.protocol.messages.tensors import SavedTensor, StateRef, TensorData
from moreh_ap.runtime.worker.commands.tables import Handlers, Tables
from moreh_ap.runtime.worker.optimizer_offload import OffloadedState
from moreh_ap.runtime.worker.worker_device import WorkerDevice

_FUSED_ON_GPUS = (torch.optim.Adam, torch.optim.AdamW)
"""Whose step is one kernel on a GPU where the script has not said how it runs: it reads and writes weights and state
once, where the default reads and writes them once an operation (a third of its bytes, and rounding differs in the last
bits)."""

_MADE_ANEW = ("state", "param_groups", "defaults")
"""Attributes of an optimizer that are not copied as they are."""


class OptimizerCommands:
    """Executes commands about optimizers, and about the gradients between a backward and a step."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._optimizers: dict[str, WorkerOptimizer] = tables.table()
        tables.optimizers = self._optimizers

    def handlers(self) -> Handlers:
        """Returns what executes each command."""
        return {
            BuildOptimizer: self._build,
            StepOptimizer: self._step,
            DescribeOptimizer: lambda command: self._optimizers[command.owner].describe(),
            ReleaseOptimizer: self._release,
            LoadOptimizer: lambda command: self._optimizers[command.owner].load(command.state, command.kept),
            GradientNorm: self._norm,
            ClipGradients: self._clip,
            UnscaleGradients: self._unscale,
            ClearGradients: self._clear,
        }

    def _build(self, command: BuildOptimizer) -> None:
        models = self._tables.models
        groups = [[models[ref.owner].parameter(ref.name) for ref in group] for group in command.groups]
        owners = {ref.owner for group in command.groups for ref in group}
        offload = any(models[owner].plan.offload == "optimizer" for owner in owners)
        self._optimizers[command.owner] = WorkerOptimizer(command, groups, self._tables.device, offload=offload)

    def _release(self, command: ReleaseOptimizer) -> None:
        self._optimizers.pop(command.owner, None)

    def _step(self, command: StepOptimizer) -> None:
        scaling = {name: self._number(value) for name, value in command.scaling.items()}
        self._optimizers[command.owner].step(command.changes, scaling)
        self._tables.clock.step_ended()

    def _norm(self, command: GradientNorm) -> None:
        shards, tables = self._shards(command.tensors), self._tables
        num_workers = 1 if self._are_all_here(command.tensors) else tables.world_size
        counted = [shard for shard, counts in shards if counts or num_workers == 1]
        norm = total_norm(counted, command.norm_type, tables.device.torch_device, num_workers)
        tables.temporaries[command.output] = StateShard(norm, self._position(command.tensors))

    def _are_all_here(self, tensors: int) -> bool:
        """Returns whether each worker has all elements of the tensors in a list: gradients of replicated models."""
        for ref in self._tables.lists[tensors]:
            plan = self._tables.models[ref.owner].plan if ref.kind == "grad" else None
            if plan is None or plan.shard * plan.tensor * plan.pipeline > 1:
                return False
        return True

    def _position(self, tensors: int) -> Position:
        tables = self._tables
        first = tables.lists[tensors][0]  # of whose model this stage may have no part
        is_of_model = first.owner in tables.models
        return tables.models[first.owner].applied.position if is_of_model else _position(tables.state(first))

    def _unscale(self, command: UnscaleGradients) -> None:
        gradients, tables = [shard for shard, _ in self._shards(command.gradients)], self._tables
        found = self._number(command.found).clone()
        if gradients:
            inverse_scale = self._number(command.inverse_scale)
            for device in {gradient.device for gradient in gradients}:
                here = found.to(device)
                torch._amp_foreach_non_finite_check_and_unscale_(
                    [gradient for gradient in gradients if gradient.device == device], here, inverse_scale.to(device)
                )
                found = torch.maximum(found, here.to(found.device))
        if tables.world_size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        tables.temporaries[command.output] = StateShard(found, self._position(command.gradients))

    def _number(self, value: StateRef | TensorData) -> Tensor:
        if isinstance(value, TensorData):
            return value.tensor().to(self._tables.device.torch_device)
        held = self._tables.state(value)
        assert held is not None  # every worker has it
        return held.tensor

    def _clip(self, command: ClipGradients) -> None:
        # As torch.nn.utils.clip_grad_norm_ does it, with 1e-6 against a division by zero.
        norm = self._tables.temporaries.get(command.total_norm) or self._tables.state(command.total_norm)
        assert norm is not None
        scale = (command.max_norm / (norm.tensor + 1e-6)).clamp(max=1.0)
        shards: dict[torch.device, list[Tensor]] = {}
        for shard, _ in self._shards(command.tensors):  # gradients may be in host memory, and some elsewhere
            shards.setdefault(shard.device, []).append(shard)
        for device, own in shards.items():
            torch._foreach_mul_(own, scale.to(device))

    def _shards(self, tensors: int) -> list[tuple[Tensor, bool]]:
        """Returns this worker's shards of the tensors in a list, and of each whether its elements count here.

        Gradients that were expected and are not there are left out.
        """
        found = []
        for ref in self._tables.lists[tensors]:
            if ref.kind == "grad":
                model = self._tables.models[ref.owner]
                gradient = model.parameters[ref.name].grad
                if gradient is not None:
                    if isinstance(gradient, DTensor):
                        gradient = gradient._local_tensor  # `to_local` builds a graph, a step of it for each gradient
                    found.append((gradient.detach(), model.is_canonical[ref.name]))
            elif (held := self._tables.state(ref)) is not None:
                found.append((held.local, held.is_canonical))
        return found

    def _clear(self, command: ClearGradients) -> None:
        for ref in self._tables.lists[command.gradients]:
            self._tables.models[ref.owner].parameters[ref.name].grad = None


class WorkerOptimizer:
    """The user's optimizer over this worker's shards.

    Args:
        command: The class and its defaults.
        groups: Parameters of each group, as this worker holds them; None for parameters that it does not hold.
        device: This worker's device.
        offload: Whether the state lies in host memory between steps.

    Attributes:
        refs: The names of the parameters, by which the state of each is numbered.
    """

    def __init__(
        self,
        command: BuildOptimizer,
        groups: Sequence[Sequence[StateShard | None]],
        device: WorkerDevice,
        *,
        offload: bool = False,
    ) -> None:
        cls = pickle.loads(command.pickled_class)
        self._parameters = [held for group in groups for held in group]
        self._layouts = EntryLayouts()
        self._shards: dict[DTensor, nn.Parameter] = {}  # see [Note: shards as ordinary parameters]
        here = [[self._own(held) for held in group if held is not None] for group in groups]
        self._optimizer = _made(cls, here, command)
        self.refs = [ref for group in command.groups for ref in group]
        self._device = device
        self._is_on_host = device.is_cuda and any(one.is_cpu for group in here for one in group)
        of_parameters = {self._own(one): one for one in self._parameters if one is not None}
        self._stepping: Optimizer | WholeSteps = self._optimizer
        if command.needs_whole:
            given = of_parameters, self._laid_out, self._layouts
            self._stepping = WholeSteps(self._optimizer, *given, deals=command.deals)
        self._offloaded = OffloadedState(self._optimizer, step=self._stepping.step) if offload else None
        self._fuses = device.is_cuda and not offload and not self._is_on_host
        if self._fuses:
            fuse_where_possible(self._optimizer)

    def step(self, changes: dict[int, dict[str, Any]], scaling: Mapping[str, Tensor]) -> None:
        """Take over changed hyper-parameters, then step; `scaling` is what a fused step reads as attributes."""
        for index, values in changes.items():
            self._optimizer.param_groups[index].update(values)
        if changes and self._fuses:  # the first step brings every value of the script's groups, `fused` among them
            fuse_where_possible(self._optimizer)
        if self._is_on_host:
            scaling = {name: value.cpu() for name, value in scaling.items()}
        vars(self._optimizer).update(scaling)
        for shard, own in self._shards.items():
            own.data = shard._local_tensor  # FSDP2 may have given it other memory
            gradient: Any = shard.grad
            own.grad = None if gradient is None else gradient._local_tensor
        try:
            (self._offloaded or self._stepping).step()
        finally:
            for own in self._shards.values():
                own.grad = None  # so that the memory of a gradient is free once it is cleared
        for name in scaling:
            del vars(self._optimizer)[name]

    def _own(self, held: StateShard) -> Tensor:
        """Returns what the optimizer steps: the parameter, or an ordinary one in the memory of its shard."""
        shard = held.tensor
        if not isinstance(shard, DTensor):
            return shard
        if shard not in self._shards:
            self._shards[shard] = nn.Parameter(shard._local_tensor.detach(), shard.requires_grad)
        return self._shards[shard]

    def _laid_out(self, value: Tensor, held: StateShard) -> Tensor:
        """Returns a tensor of the state as its parameter is held: a DTensor in its memory if that is sharded."""
        if not (isinstance(held.tensor, DTensor) and value.dim() > 0 and value.shape == self._own(held).shape):
            return value
        seen = torch.empty_like(held.tensor, dtype=value.dtype, device=value.device, requires_grad=False)
        seen._local_tensor = value  # type: ignore[attr-defined]
        return seen

    def state(self, index: int, key: str, *, fetch: bool = True) -> StateShard | None:
        """One tensor of the state of parameter `index`; None if the parameter is not here.

        State that lies in host memory comes to the device for it, and goes back after the next step; without `fetch` it
        is left where it is.
        """
        held = self._parameters[index]
        if held is None:
            return None
        own = self._own(held)
        if self._offloaded is not None and fetch:
            self._offloaded.fetch(own)
        value = self._optimizer.state[own][key]
        if not self._layouts.is_laid_out(own, key, value):
            return StateShard(value, held.position, None, held.is_first)
        return held.like(self._laid_out(value, held))

    def describe(self) -> dict[int, dict[str, Any]]:
        """The state by parameter index: a meta tensor for what is shaped like the parameter, else the value."""
        described: dict[int, dict[str, Any]] = {}
        for index, held in enumerate(self._parameters):
            own = None if held is None else self._own(held)
            entries = None if own is None else self._optimizer.state.get(own)
            if held is not None and own is not None and entries:
                described[index] = {key: self._describe(key, value, own, held) for key, value in entries.items()}
        return described

    def _describe(self, key: str, value: Any, own: Tensor, held: StateShard) -> Any:
        if self._layouts.is_laid_out(own, key, value):
            return torch.empty(held.shape, dtype=value.dtype, device="meta")
        return value.detach().cpu() if isinstance(value, Tensor) else value

    def load(self, state: dict[int, dict[str, Any]], kept: Mapping[int, tuple[str, ...]]) -> None:
        """Replaces the state but for what is `kept`; tensors shaped like their parameter are laid out like it."""
        left = {index: self._left(index, keys) for index, keys in kept.items()}
        self._optimizer.state.clear()
        groups = self._optimizer.param_groups
        fused = {parameter for group in groups if group.get("fused") for parameter in group["params"]}
        for index, entries in state.items():
            if (held := self._parameters[index]) is not None:
                decoded = {key: self._decode(value, held) for key, value in entries.items()}
                own = self._own(held)
                if own in fused and "step" in decoded:  # such a step counts on the device
                    decoded["step"] = decoded["step"].to(own.device)
                shapes = {key: _shape(value) for key, value in entries.items()}
                complete = {key for key, shape in shapes.items() if shape is not None and shape != held.shape}
                self._optimizer.state[own] = left.get(index, {}) | decoded
                self._layouts.note(own, complete)
                if self._offloaded is not None:
                    self._offloaded.put_away(own)

    def _left(self, index: int, keys: tuple[str, ...]) -> dict[str, Any]:
        """Returns some entries of the state of a parameter, on the device; none if it is not here."""
        if (held := self._parameters[index]) is None:
            return {}
        own = self._own(held)
        if self._offloaded is not None:
            self._offloaded.fetch(own)
        return {key: self._optimizer.state[own][key] for key in keys}

    def held(self) -> dict[str, Any]:
        """Returns what the optimizer keeps, for another process with the same one."""
        optimizer = self._optimizer
        own = {name: value for name, value in vars(optimizer).items() if name not in _MADE_ANEW and name[:1] != "_"}
        states = [None if held is None else optimizer.state.get(self._own(held)) for held in self._parameters]
        complete = [None if held is None else self._layouts.complete(self._own(held)) for held in self._parameters]
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return {"own": own, "states": states, "complete": complete, "groups": groups}

    def states(self) -> Iterator[tuple[int, str, Tensor, StateShard]]:
        """Yields the tensors of the state that are laid out like their parameters: number, key, tensor, parameter.

        Of a sharded one the tensor is what is here of it.
        """
        for index, shard in enumerate(self._parameters):
            if shard is None:
                continue
            own = self._own(shard)
            for key, value in self._optimizer.state.get(own, {}).items():
                if self._layouts.is_laid_out(own, key, value):
                    yield index, key, value, shard

    def put_back(self, held: Mapping[str, Any]) -> None:
        """Takes over what `held` has returned in another process."""
        vars(self._optimizer).update(held["own"])
        self._optimizer.state.clear()
        for shard, state, complete in zip(self._parameters, held["states"], held["complete"]):
            if shard is not None and state is not None:
                self._optimizer.state[self._own(shard)] = state
                self._layouts.note(self._own(shard), complete)
        for group, values in zip(self._optimizer.param_groups, held["groups"]):
            group.update(values)

    def take_over(self, held: Mapping[str, Any], state: dict[int, dict[str, Any]]) -> None:
        """Takes over what `held` has returned under another plan; `state` is as for `load`, with whole tensors."""
        vars(self._optimizer).update(held["own"])
        for group, values in zip(self._optimizer.param_groups, held["groups"]):
            group.update(values)
        self.load(state, kept={})

    def _decode(self, value: Any, held: StateShard) -> Any:
        if isinstance(value, SavedTensor):
            return self._read(value, held)
        tensor = value.tensor() if isinstance(value, TensorData) else value
        if not isinstance(tensor, Tensor):
            return tensor
        if _shape(tensor) != held.shape:
            is_on_device = value.on_device if isinstance(value, TensorData) else tensor.dim() > 0
            return tensor.to(held.local.device) if is_on_device else tensor
        local = torch.zeros_like(self._own(held), dtype=tensor.dtype, requires_grad=False)
        held.like(self._laid_out(local, held)).write(tensor)
        return local

    def _read(self, saved: SavedTensor, held: StateShard) -> Tensor:
        if saved.shape == held.shape:
            local = torch.zeros_like(self._own(held), dtype=saved.dtype, requires_grad=False)
            shard, layout = self._laid_out(local, held), held.layout
        else:
            shard = local = torch.zeros(saved.shape, dtype=saved.dtype, device=held.local.device)
            layout = None
        read(Wanted("optimizer state", shard, source, layout) for source in saved.sources)
        return local


def _made(cls: type[Optimizer], groups: list[list[Tensor]], command: BuildOptimizer) -> Optimizer:
    """Returns an optimizer over parameters, with the settings of its class until a first step brings the script's."""
    listed = [{"params": group} for group in groups]
    if command.attributes is None:
        return cls(listed, **command.defaults)
    made = object.__new__(cls)
    Optimizer.__init__(made, listed, command.defaults)
    vars(made).update(command.attributes)
    return made


def fuse_where_possible(optimizer: torch.optim.Optimizer) -> None:
    """Has groups of `_FUSED_ON_GPUS` step as one kernel unless the script decided how they step."""
    if type(optimizer) not in _FUSED_ON_GPUS:
        return
    for group in optimizer.param_groups:
        is_undecided = group["fused"] is None and group["foreach"] is None
        is_usual = not (group["capturable"] or group["differentiable"])
        if is_undecided and is_usual and all(parameter.is_floating_point() for parameter in group["params"]):
            group["fused"] = True


def _position(held: StateShard | None) -> Position:
    assert held is not None  # no stage of a pipeline is without a tensor that is of no model
    return held.position


def _shape(value: Any) -> tuple[int, ...] | None:
    """Returns the shape of a tensor of the state as it is sent, saved or held; None for other values."""
    return tuple(value.shape) if isinstance(value, (Tensor, TensorData, SavedTensor)) else None
