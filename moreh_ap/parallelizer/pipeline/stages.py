"""The stages of a pipeline: which blocks and parameters a worker holds, and what it shares with other stages.

Decides the cut of a model into stages. Must not know micro-batches, schedules, losses or messages.

[Note: held twice]
A parameter used on several stages (tied embedding and head; a positional parameter used between modules) is held by
each of them. Their gradients are summed after every backward, so the copies step alike. The first holder's copy is
canonical: it is read, counted in norms, and saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import get_rank, get_world_size

from moreh_ap.errors import UnsupportedError
from moreh_ap.parallelizer.mesh import Axis, subgroup
from moreh_ap.parallelizer.pipeline.stage import Stage
from moreh_ap.parallelizer.pipeline.trace import Trace, Uncuttable, trace_again
from moreh_ap.parallelizer.state.loading import local_shard
from moreh_ap.parallelizer.tensor.crossing import Crossing
from moreh_ap.plan import Plan

_ATTRIBUTE = "_moreh_stages"


class Stages:
    """The stages of a pipeline that one worker holds.

    Attributes:
        num_stages: Stages of all workers together.
        ranges: The blocks of every stage.
        body: Path of the list of blocks.
        carried: Which arguments of a block travel with what it returned, see `Trace`.
        local: This worker's stages, by number.
        axis: The workers that hold the other stages; stage `s` is on worker `s % axis.size` of it.
        device: This worker's device.
        absent: Names of the parameters that this worker does not hold, tied names included.
        everywhere: Names of the parameters that every worker holds.
        schedules: Schedules made so far, by number of micro-batches.
    """

    def __init__(
        self,
        module: nn.Module,
        meta_module: nn.Module,
        plan: Plan,
        axis: Axis,
        found: Trace,
        device: torch.device,
        crossing: Crossing | None = None,
    ) -> None:
        self.num_stages = plan.num_stages
        self.axis = axis
        self.device = device
        self.ranges = plan.stage_ranges(found.num_blocks)
        self.body, self.carried = found.body, found.carried
        self.schedules: dict[int, tuple[Any, list[Any]]] = {}
        self._found = found
        self._module = module
        holders = {name: self._holders_of(name, found) for name, _ in module.named_parameters()}
        self._held: dict[str, list[int]] = {}
        for name, stages in holders.items():
            for tied in _with_tied_names(module, {name}):
                self._held[tied] = [stage % axis.size for stage in sorted(stages)]
        workers = {name: sorted({stage % axis.size for stage in stages}) for name, stages in holders.items()}
        self.everywhere = _with_tied_names(module, {name for name, held in workers.items() if len(held) == axis.size})
        self.absent = _with_tied_names(module, {name for name, held in workers.items() if axis.rank not in held})
        self._shared = {name: held for name, held in workers.items() if len(held) > 1}
        self._groups = _make_groups(sorted({tuple(held) for held in self._shared.values()}), axis)
        self.local: dict[int, Stage] = {}
        for number in range(axis.rank, self.num_stages, axis.size):
            self.local[number] = self._build(number, meta_module, holders)
            self.local[number].crossing = crossing

    @property
    def last_worker(self) -> int:
        """The place on the axis of the worker with the last stage: it has the results."""
        return (self.num_stages - 1) % self.axis.size

    def of_last_stage(self, found: Any) -> Any:
        """Returns what the worker of the last stage has found. A collective; `found` can be pickled."""
        told = [found]
        dist.broadcast_object_list(told, group=self.axis.group, group_src=self.last_worker)
        return told[0]

    def check(self, meta_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Checks that every stage has what a call of the model needs of it.

        Args:
            meta_module: The model on meta, without a plan.
            args: Positional arguments of the call.
            kwargs: Keyword arguments, likewise.

        Raises:
            UnsupportedError: The call goes another way through the model than the first one, for which it was cut.
        """
        try:
            found = trace_again(self._found, meta_module, args, kwargs, self.device)
            misfit = "" if found is None else self._misfit_of(found)
        except Uncuttable as reason:
            misfit = str(reason)
        if misfit:
            raise UnsupportedError(
                f"a pipeline is cut for the first call of a model, and another of {type(meta_module).__name__} differs "
                f"from it: {misfit}",
                "calls that use the same parameters between the same blocks, or plans with pipeline=1",
                'plan="shard=2"',
            )

    def _misfit_of(self, found: Trace) -> str:
        """Returns what a call needs that stages do not have; empty if nothing is missing."""
        for name in found.places:
            if not set(self._holders_of(name, found)) <= set(self._holders_of(name, self._found)):
                return f"{name} is used where that did not use it"
        return "" if set(found.carried) <= set(self.carried) else "what a block is given is used again behind it"

    def first_holder_of(self, name: str) -> int:
        """Returns the place on the axis whose copy of a parameter counts. See [Note: held twice]."""
        return self._held[name][0]

    def holder_of_all(self, names: Sequence[str]) -> int:
        """Returns the first place on the axis whose worker holds all of some parameters, which a module uses together:
        of a head, the embedding's weight and a bias of its own."""
        first, *others = names
        return next(place for place in self._held[first] if all(place in self._held[name] for name in others))

    def holder_of_buffer(self, name: str) -> int:
        """Returns the place on the axis whose copy of a buffer a forward may have changed."""
        if not name.startswith(f"{self.body}."):
            return 0
        return self._stage_of(self._block_of(name)) % self.axis.size

    def _block_of(self, name: str) -> int:
        key = name.removeprefix(f"{self.body}.").split(".", 1)[0]
        return list(self._module.get_submodule(self.body)._modules).index(key)

    @contextmanager
    def sums_shared_gradients(self) -> Iterator[None]:
        """What backward adds inside the block to gradients of shared parameters is summed over their holders."""
        params = self._shared_parameters()
        earlier = [param.grad for param in params.values()]
        for param in params.values():
            param.grad = None
        done = False
        try:
            yield
            done = True
        finally:
            for (name, param), before in zip(params.items(), earlier, strict=True):
                if not done:
                    param.grad = before
                    continue
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                dist.all_reduce(local_shard(param.grad), group=self._groups[tuple(self._shared[name])])
                if before is not None:
                    param.grad = before.add_(param.grad)

    def _shared_parameters(self) -> dict[str, nn.Parameter]:
        params = dict(self._module.named_parameters())
        return {
            name: params[name]
            for name, held in self._shared.items()
            if self.axis.rank in held and params[name].requires_grad
        }

    def _holders_of(self, name: str, found: Trace) -> list[int]:
        """Returns the stages that hold a parameter; if no forward used it, the stage of its module holds it."""
        last = self.num_stages - 1
        places = found.places.get(name)
        if places is None:
            if not name.startswith(f"{found.body}."):
                return [last]
            return [self._stage_of(self._block_of(name))]
        stages = {last if place == found.num_blocks else self._stage_of(place) for place in places}
        if name in found.direct:
            stages |= set(range(min(stages), self.num_stages))
        return sorted(stages)

    def _stage_of(self, block: int) -> int:
        return next(number for number, own in enumerate(self.ranges) if block in own)

    def _build(self, number: int, meta_module: nn.Module, holders: Mapping[str, Sequence[int]]) -> Stage:
        found = self._found
        elsewhere = _with_tied_names(self._module, {name for name, held in holders.items() if number not in held})
        others, replaced = [], []
        for path, submodule in self._module.named_modules():
            names = [name for name, _ in submodule.named_parameters(path, recurse=False)]
            outside = not path.startswith(f"{found.body}.")
            if not outside or not names or next(submodule.children(), None) is not None:
                continue
            if all(name in elsewhere for name in names):
                if path in found.before:
                    replaced.append(path)
            else:
                others.append(path)
        own = self.ranges[number]
        is_last = own.stop == found.num_blocks
        return Stage(self._module, meta_module, number, found.body, own, is_last, others, replaced, found.carried)


def _with_tied_names(module: nn.Module, names: set[str]) -> frozenset[str]:
    """Returns the names with all other names of the same parameters."""
    by_id: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(param), []).append(name)
    return frozenset(name for same in by_id.values() if any(n in names for n in same) for name in same)


def _make_groups(sets: Sequence[tuple[int, ...]], axis: Axis) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Returns a process group for each set of places on the axis. A collective over all workers."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    every: list[Any] = [None] * get_world_size()
    dist.all_gather_object(every, (dist.get_process_group_ranks(axis.group), [list(held) for held in sets]))
    made: set[tuple[int, ...]] = set()
    for ranks, wanted in every:
        for held in wanted:
            members = tuple(ranks[place] for place in held)
            if members in made:
                continue
            made.add(members)
            group = subgroup(members, dist.distributed_c10d._get_default_group())
            if get_rank() in members:
                groups[tuple(held)] = group
    return groups


def attach(module: nn.Module, stages: Stages) -> None:
    """Makes `stages_of(module)` return `stages`."""
    object.__setattr__(module, _ATTRIBUTE, stages)


def stages_of(module: nn.Module) -> Stages | None:
    """Returns this worker's stages of the module, None where no pipeline was applied."""
    return module.__dict__.get(_ATTRIBUTE)
