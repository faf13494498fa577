"""Steps of an optimizer that needs whole parameters: gathered where workers hold shards, and dealt to the workers.

Decides what is gathered for a step, who takes it, and what of its results a worker keeps. Must not know what the
optimizer computes, or how state travels.

[Note: whole parameters]
Some optimizers take norms, means or products of a parameter's rows (LAMB, Adafactor, Muon). Where workers hold shards,
a parameter is gathered with its gradient and its state, stepped, and each worker keeps its shard again. So few
parameters are whole at a time, and state that is laid out like its parameter stays sharded between steps.

[Note: dealt steps]
A step that multiplies matrices (Muon, SOAP, Shampoo) takes longer than sending what it makes. So each of the workers
that share the batch steps its part of the parameters and sends them, with their state, to the others. All of them
have what each would have computed, and stay copies of each other. Of sharded parameters as many are gathered at a time
as workers step. A step that multiplies none reads and writes its parameter a few times: every worker takes it for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.state.entry_layouts import EntryLayouts
from moreh_ap.parallelizer.state.state_shard import StateShard

_ALONE = Axis(0, 1, None)
Turn = tuple[int, Tensor, int]
"""The number of a group, a parameter of it, and the rank that steps that."""


class WholeSteps:
    """Steps `optimizer` as if this worker had whole parameters. A collective of all workers that hold parts of them.

    Args:
        optimizer: One that steps a parameter alone as it does among others.
        held: What each of its parameters is the memory of.
        laid_out: Returns a tensor with the shape of an optimizer's parameter as that is held.
        layouts: Knows which entries of the state are laid out like their parameter, and is told.
        deals: Whether workers share the parameters among them; else each steps all.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        held: Mapping[Tensor, StateShard],
        laid_out: Callable[[Tensor, StateShard], Tensor],
        layouts: EntryLayouts,
        *,
        deals: bool = False,
    ) -> None:
        self._optimizer, self._held, self._laid_out = optimizer, held, laid_out
        self._layouts = layouts
        axes = {one.position.data for one in held.values()} if deals else set()
        self._axis = axes.pop() if len(axes) == 1 else _ALONE

    def step(self) -> None:
        """Steps every parameter of the optimizer's groups that has a gradient.

        Raises:
            Exception: What the optimizer's step has raised on one of the workers.
        """
        groups, step = self._optimizer.param_groups, from_same_settings(self._optimizer, self._optimizer.step)
        listed = [group["params"] for group in groups]
        try:
            for turns in self._rounds(listed):
                self._take(turns, step)
        finally:
            for group, parameters in zip(groups, listed):
                group["params"] = parameters

    def _rounds(self, groups: Sequence[Sequence[Tensor]]) -> Iterator[list[Turn]]:
        """Yields the parameters that are stepped at a time: all that are complete here, then a shard for each worker.

        The largest come first, each to the worker that has least to do, so that workers end about together.
        """
        found = [(number, one) for number, group in enumerate(groups) for one in group if one.grad is not None]
        complete = [one for one in found if not _is_cut(self._held[one[1]])]
        if complete:
            yield self._dealt(complete)
        cut = sorted((one for one in found if _is_cut(self._held[one[1]])), key=self._work, reverse=True)
        for begin in range(0, len(cut), self._axis.size):
            yield self._dealt(cut[begin : begin + self._axis.size])

    def _dealt(self, parameters: Sequence[tuple[int, Tensor]]) -> list[Turn]:
        work, turns = [0] * self._axis.size, []
        for number, parameter in sorted(parameters, key=self._work, reverse=True):
            rank = work.index(min(work))
            work[rank] += self._work((number, parameter))
            turns.append((number, parameter, rank))
        return turns

    def _work(self, parameter: tuple[int, Tensor]) -> int:
        """Returns about how much a step of a parameter computes: products of a matrix with its smaller side."""
        shape = self._held[parameter[1]].shape
        return max(1, torch.Size(shape).numel()) * (min(shape) if len(shape) > 1 else 1)

    def _take(self, turns: Sequence[Turn], step: Callable[[], object]) -> None:
        """Steps some parameters, each on its worker."""
        groups, is_mine = self._optimizer.param_groups, [rank == self._axis.rank for _, _, rank in turns]
        whole = [self._gathered(parameter, is_kept=mine) for (_, parameter, _), mine in zip(turns, is_mine)]
        own = [(number, full) for (number, _, _), full, mine in zip(turns, whole, is_mine) if mine]
        for index, group in enumerate(groups):
            group["params"] = [full for number, full in own if number == index]
        error = None
        if own:
            try:
                step()
            except Exception as raised:  # the others wait for what this worker computes, and have to hear of it
                error = raised
        states = self._optimizer.state
        entries = [dict(states.get(full) or {}) if mine else {} for full, mine in zip(whole, is_mine)]
        if self._axis.size > 1:
            self._exchange(turns, whole, entries, error, has_stepped=bool(own))
        elif error is not None:
            raise error
        for (_, parameter, _), full, entry in zip(turns, whole, entries):
            self._keep(parameter, full, entry)

    def _gathered(self, parameter: Tensor, *, is_kept: bool) -> Tensor:
        """Returns a whole parameter with its gradient and state if it is kept here, else memory for one."""
        states, held = self._optimizer.state, self._held[parameter]
        if not _is_cut(held):
            return parameter

        def whole(value: Tensor) -> Tensor:
            return held.like(self._laid_out(value, held)).whole_tensor().detach()

        assert parameter.grad is not None
        value, gradient, before = whole(parameter), whole(parameter.grad), states.get(parameter) or {}
        is_laid_out = self._layouts.is_laid_out
        state = {key: whole(one) if is_laid_out(parameter, key, one) else one for key, one in before.items()}
        full = nn.Parameter(value.clone(), parameter.requires_grad)
        if is_kept:
            full.grad = gradient
            if state:
                states[full] = state
        return full

    def _exchange(
        self,
        turns: Sequence[Turn],
        whole: Sequence[Tensor],
        entries: list[dict[str, Any]],
        error: Exception | None,
        *,
        has_stepped: bool,
    ) -> None:
        """Fills `whole` and `entries` with what the workers have computed.

        Raises:
            Exception: What one of their steps has raised.
        """
        axis, groups = self._axis, self._optimizer.param_groups
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        told: list[Any] = [None] * axis.size
        small = [{key: _told(value, full) for key, value in entry.items()} for full, entry in zip(whole, entries)]
        dist.all_gather_object(told, (error, settings if has_stepped else None, small), group=axis.group)
        if (raised := next((one for one, _, _ in told if one is not None), None)) is not None:
            raise raised
        if not has_stepped:
            for group, changed in zip(groups, next(one for _, one, _ in told if one is not None)):
                group.update(changed)
        sent = []
        for number, ((_, parameter, rank), full) in enumerate(zip(turns, whole)):
            if rank != axis.rank:
                before = self._optimizer.state.get(parameter) or {}
                of_owner = told[rank][2][number].items()
                entries[number] = {key: _memory(value, before.get(key), full) for key, value in of_owner}
            tensors = [value for value in entries[number].values() if _travels(value, full)]
            sent += [(value.detach(), rank) for value in (full, *tensors)]
        waiting = [dist.broadcast(value, group=axis.group, group_src=rank, async_op=True) for value, rank in sent]
        for one in waiting:
            one.wait()

    def _keep(self, parameter: Tensor, full: Tensor, after: dict[str, Any]) -> None:
        """Takes over a parameter's value and state after its step."""
        states, held = self._optimizer.state, self._held[parameter]
        if full is parameter:
            kept = after
        else:
            states.pop(full, None)
            before = states.get(parameter) or {}
            held.write(full.detach())
            kept = {key: self._kept(key, value, full, before.get(key), parameter) for key, value in after.items()}
            self._layouts.note(parameter, {key for key, value in after.items() if not _is_like(value, full)})
        if kept:
            states[parameter] = kept

    def _kept(self, key: Any, value: Any, full: Tensor, before: Any, parameter: Tensor) -> Any:
        """Returns what a worker keeps of an entry of the state: its shard of a tensor with the parameter's shape."""
        if not _is_like(value, full):
            return value
        held = self._held[parameter]
        is_there = self._layouts.is_laid_out(parameter, key, before) and before.dtype == value.dtype
        shard = before if is_there else parameter.detach().new_empty(parameter.shape, dtype=value.dtype)
        held.like(self._laid_out(shard, held)).write(value)
        return shard


class _Sent(NamedTuple):
    """What the others are told of a tensor of the state that is sent to them."""

    shape: torch.Size
    dtype: torch.dtype


def _travels(value: Any, parameter: Tensor) -> bool:
    """Returns whether an entry of the state is sent as a tensor; others are told with what is small."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.device == parameter.device


def _told(value: Any, parameter: Tensor) -> Any:
    return _Sent(value.shape, value.dtype) if _travels(value, parameter) else value


def _memory(told: Any, before: Any, parameter: Tensor) -> Any:
    """Returns an entry of the state as another worker has told of it: a tensor that is sent is still to be filled."""
    if not isinstance(told, _Sent):
        return told
    is_there = _travels(before, parameter) and before.shape == told.shape and before.dtype == told.dtype
    return before if is_there else torch.empty(told.shape, dtype=told.dtype, device=parameter.device)


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
