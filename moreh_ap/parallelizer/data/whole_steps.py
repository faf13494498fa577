"""Steps of an optimizer that needs whole parameters, where workers hold shards: one parameter after the other.

Decides what is gathered for a step, and what of its results a worker keeps. Must not know what the optimizer computes,
or how state travels.

[Note: whole parameters]
Some optimizers take norms, means or products of a parameter's rows (LAMB, Adafactor, Muon). Workers gather one
parameter with its gradient and its state, all of them step it, and each keeps its shard again. So no more than one
parameter is whole at a time, and state that is laid out like its parameter stays sharded between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moreh_ap.parallelizer.state.state_shard import StateShard


class WholeSteps:
    """Steps `optimizer`, whose parameters are shards of others, as if it had whole ones. A collective.

    Args:
        optimizer: One that steps a parameter alone as it does among others.
        held: What each of its parameters is the memory of.
        laid_out: Returns a tensor with the shape of an optimizer's parameter as that is held.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        held: Mapping[Tensor, StateShard],
        laid_out: Callable[[Tensor, StateShard], Tensor],
    ) -> None:
        self._optimizer, self._held, self._laid_out = optimizer, held, laid_out

    def step(self) -> None:
        """Steps every parameter of the optimizer's groups."""
        groups, step = self._optimizer.param_groups, from_same_settings(self._optimizer, self._optimizer.step)
        listed = [group["params"] for group in groups]
        try:
            for group, parameters in zip(groups, listed):
                group["params"] = [one for one in parameters if not _is_cut(self._held[one])]
            if any(group["params"] for group in groups):
                step()
            for group in groups:
                group["params"] = []
            for group, parameters in zip(groups, listed):
                for one in parameters:
                    if _is_cut(self._held[one]) and one.grad is not None:
                        self._step_whole(group, one, step)
                group["params"] = []
        finally:
            for group, parameters in zip(groups, listed):
                group["params"] = parameters

    def _step_whole(self, group: dict[str, Any], parameter: Tensor, step: Callable[[], object]) -> None:
        """Steps one parameter of which this worker holds a shard, by a step of the optimizer."""
        states, held = self._optimizer.state, self._held[parameter]

        def whole(value: Tensor) -> Tensor:
            return held.like(self._laid_out(value, held)).whole_tensor().detach()

        assert parameter.grad is not None
        full = nn.Parameter(whole(parameter).clone(), parameter.requires_grad)
        full.grad = whole(parameter.grad)
        before = states.get(parameter) or {}
        if before:
            states[full] = {key: whole(value) if _is_like(value, parameter) else value for key, value in before.items()}
        group["params"] = [full]
        step()
        held.write(full.detach())
        after = states.pop(full, None) or {}
        kept = {key: self._kept(value, full, before.get(key), parameter) for key, value in after.items()}
        if kept:
            states[parameter] = kept

    def _kept(self, value: Any, full: Tensor, before: Any, parameter: Tensor) -> Any:
        """Returns what a worker keeps of an entry of the state: its shard of a tensor with the parameter's shape."""
        if not _is_like(value, full):
            return value
        held = self._held[parameter]
        is_there = _is_like(before, parameter) and before.dtype == value.dtype
        shard = before if is_there else parameter.detach().new_empty(parameter.shape, dtype=value.dtype)
        held.like(self._laid_out(shard, held)).write(value)
        return shard


def from_same_settings(optimizer: Optimizer, step: Callable[[], object]) -> Callable[[], None]:
    """Returns a step that begins with the present settings of groups whenever it is taken.

    A step of some parameters after others is then like one of all of them, where steps change settings (count steps).
    """
    before = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]

    def again() -> None:
        for group, settings in zip(optimizer.param_groups, before):
            parameters = group["params"]
            group.clear()
            group.update({**settings, "params": parameters})
        step()

    return again


def _is_cut(held: StateShard) -> bool:
    """Returns whether workers hold shards of a tensor; each of them finds the same."""
    is_sharded = isinstance(held.tensor, DTensor) and held.tensor.device_mesh.size() > 1
    return is_sharded or held.layout is not None


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
