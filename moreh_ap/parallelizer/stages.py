"""The stages of a pipeline: which blocks and parameters a worker holds, and how the model's own forward runs on them.

Decides the cut of a model into stages. Must not know micro-batches, schedules, losses or messages.

[Note: the model's own forward]
No model is rewritten. Every stage runs the forward of the whole model, in which a block of an earlier stage passes its
input on, the last of them hands out what was received from the stage before, and after the stage's own last block the
forward is left by an exception that carries what that block returned. Modules outside the blocks whose parameters are
elsewhere (an embedding) return NaN in the right shape: what is computed from it must not matter, and if it does (a
model that feeds embeddings into its last layer), the loss says so at once instead of being wrong.

[Note: held twice]
A parameter used on several stages (tied embedding and head; a positional parameter used between modules) is held by each
of them. Their gradients are summed after every backward, so the copies step alike. The first holder's copy is the one
that is read, counted in norms, and saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from moreh_ap.parallelizer.loading import local_part
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.tensor_crossing import Crossing
from moreh_ap.parallelizer.tensor_sequence import splits
from moreh_ap.parallelizer.tensor_split import SplitTensor
from moreh_ap.parallelizer.trace import Trace
from moreh_ap.plan import Plan

Nesting = tuple[list[Any], TreeSpec]
"""How a block's result nests: its leaves, with a `Travelling` in place of each tensor, and the tree."""


@dataclass(frozen=True)
class Travelling:
    """Stands for a tensor that travels between stages.

    Attributes:
        length: How long it is along the sequence (dim 1), where each rank of the tensor axis has and sends a part of
            that; None where it travels whole.
    """

    length: int | None


_ATTRIBUTE = "_moreh_stages"


class _StageEnd(BaseException):
    """Leaves a forward after the stage's last block; carries what that block returned."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


class Stage(nn.Module):
    """One stage: a module whose children are the stage's blocks and whatever else it owns, for FSDP2 to manage.

    Args:
        model: The whole model; parameters that are elsewhere are on meta.
        meta_module: A copy of it on meta without a plan.
        index: Number of the stage.
        body: Path of the list of blocks.
        own: Numbers of the stage's blocks.
        is_last: Whether it has the last block.
        others: Paths of the modules outside the blocks that it owns.
        replaced: Paths of the modules outside the blocks whose parameters are elsewhere.

    Attributes:
        nesting: How the result of the last block nested when the stage last ran.
        crossing: The tensor axis along which sequences are split between blocks; None if they are not.
    """

    def __init__(
        self,
        model: nn.Module,
        meta_module: nn.Module,
        index: int,
        body: str,
        own: range,
        is_last: bool,
        others: Sequence[str],
        replaced: Sequence[str],
    ) -> None:
        super().__init__()
        blocks = list(model.get_submodule(body).children())
        self.index, self.own, self.is_last = index, own, is_last
        self.blocks = nn.ModuleList(blocks[i] for i in own)
        self.others = nn.ModuleList(model.get_submodule(path) for path in others)
        self.nesting: Nesting | None = None
        self.crossing: Crossing | None = None
        self._received: tuple[tuple[Tensor, ...], Nesting | None] = ((), None)
        placeholders: dict[tuple[str, str], nn.Module] = {}
        names = list(model.get_submodule(body)._modules)
        for number in range(own.start):
            kind = _Receiver if number == own.start - 1 else _PassOn
            placeholders[(body, names[number])] = kind(blocks[number], self)
        if not is_last:
            placeholders[(body, names[own.stop - 1])] = _Border(blocks[own.stop - 1])
        for path in replaced:
            parent, _, leaf = path.rpartition(".")
            placeholders[(parent, leaf)] = _Elsewhere(meta_module.get_submodule(path))
        # Not as children: the model contains this stage's modules, not the other way round.
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_placeholders", placeholders)

    def forward(
        self, received: tuple[Tensor, ...], nesting: Nesting | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns the tensors for the next stage as a tuple, or on the last stage the model's result.

        Args:
            received: What the stage before returned; empty on the first.
            nesting: How that nested; None on the first.
            args: Positional arguments of the model's forward.
            kwargs: Keyword arguments, likewise.
        """
        self._received = (received, nesting)
        try:
            with self._placed():
                return self._model(*args, **kwargs)
        except _StageEnd as end:
            leaves, spec = tree_flatten(end.result)
            lengths = (leaf.shape[1] if isinstance(leaf, SplitTensor) else None for leaf in _tensors(leaves))
            self.nesting = nesting_of(leaves, spec, lengths)
            return tuple(local_part(leaf) for leaf in _tensors(leaves))
        finally:
            self._received = ((), None)

    def received_result(self) -> Any:
        """Returns what the last block of the stage before returned."""
        tensors, nesting = self._received
        assert nesting is not None
        marks = [leaf for leaf in nesting[0] if isinstance(leaf, Travelling)]
        return _nest(nesting, map(self._joined, tensors, marks))

    def _joined(self, part: Tensor, mark: Travelling) -> Tensor:
        if mark.length is None:
            return part
        assert self.crossing is not None
        return SplitTensor.from_local(part, mark.length, 1, self.crossing)

    def pass_on(self, hidden: Tensor) -> Any:
        """Returns `hidden` in the nesting that blocks use."""
        _, nesting = self._received
        assert nesting is not None
        return _nest(nesting, itertools.repeat(hidden))

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Puts placeholders where other stages' modules are."""
        before: list[tuple[nn.Module, str, Any]] = []
        try:
            for (path, name), placeholder in self._placeholders.items():
                parent = self._model.get_submodule(path)
                before.append((parent, name, parent._modules[name]))
                parent._modules[name] = placeholder
            yield
        finally:
            for parent, name, module in before:
                parent._modules[name] = module


class _Placeholder(nn.Module):
    """Stands for a module; its attributes are that module's."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_original", original)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


class _PassOn(_Placeholder):
    """A block of an earlier stage: returns the first tensor it is given."""

    def __init__(self, original: nn.Module, stage: Stage) -> None:
        super().__init__(original)
        object.__setattr__(self, "_stage", stage)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = next(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
        return self.__dict__["_stage"].pass_on(hidden)


class _Receiver(_PassOn):
    """The last block of the stage before: returns what that block returned."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_stage"].received_result()


class _Border(_Placeholder):
    """The last block of a stage: runs, and leaves the model's forward with what it returned."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _StageEnd(self.__dict__["_original"](*args, **kwargs))


class _Elsewhere(_Placeholder):
    """A module outside the blocks whose parameters are on another stage: NaN in the shape it would return."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = next(leaf.device for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
        meta_args, meta_kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        with torch.no_grad(), torch._C.DisableTorchFunction():
            result = self.__dict__["_original"](*meta_args, **meta_kwargs)
        return tree_map_only(Tensor, lambda t: _unknown(t, device), result)


def _unknown(like: Tensor, device: torch.device) -> Tensor:
    if like.is_floating_point():
        return torch.full(like.shape, torch.nan, dtype=like.dtype, device=device)
    return torch.zeros(like.shape, dtype=like.dtype, device=device)


def nesting_of(leaves: Sequence[Any], spec: TreeSpec, lengths: Iterable[int | None]) -> Nesting:
    """Returns how a flattened result nests; `lengths` has the `Travelling.length` of each tensor."""
    marks = map(Travelling, lengths)
    return [next(marks) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec


def _tensors(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _nest(nesting: Nesting, tensors: Iterator[Tensor]) -> Any:
    leaves, spec = nesting
    return tree_unflatten([next(tensors) if isinstance(leaf, Travelling) else leaf for leaf in leaves], spec)


class Stages:
    """What one worker has of a pipeline.

    Attributes:
        num_stages: Stages of all workers together.
        ranges: The blocks of every stage.
        body: Path of the list of blocks.
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
        self.body = found.body
        self.schedules: dict[int, tuple[Any, list[Any]]] = {}
        self._found = found
        self._module = module
        holders = {name: self._holders_of(name) for name, _ in module.named_parameters()}
        self._first_holder = {}
        for name, stages in holders.items():
            for tied in _with_tied_names(module, {name}):
                self._first_holder[tied] = min(stages) % axis.size
        workers = {name: sorted({stage % axis.size for stage in stages}) for name, stages in holders.items()}
        self.everywhere = _with_tied_names(module, {name for name, held in workers.items() if len(held) == axis.size})
        self.absent = _with_tied_names(module, {name for name, held in workers.items() if axis.rank not in held})
        self._shared = {name: held for name, held in workers.items() if len(held) > 1}
        self._groups = _make_groups(sorted({tuple(held) for held in self._shared.values()}), axis)
        self.local: dict[int, Stage] = {}
        for number in range(axis.rank, self.num_stages, axis.size):
            self.local[number] = self._build(number, meta_module, holders)
            self.local[number].crossing = crossing
        self._crossing = crossing

    def split_length(self, shape: tuple[int, ...]) -> int | None:
        """Returns how long a hidden state of this shape is along its sequence if ranks have parts of it, else None."""
        if self._crossing is None or len(shape) != 3 or not splits(shape[1], self._crossing):
            return None
        return shape[1]

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns what this worker has of a hidden state between blocks."""
        if self._crossing is None or self.split_length(shape) is None:
            return shape
        start, stop = self._crossing.part_of(shape[1])
        return (shape[0], stop - start, *shape[2:])

    @property
    def last_worker(self) -> int:
        """The place on the axis of the worker with the last stage: it has the results."""
        return (self.num_stages - 1) % self.axis.size

    def first_holder_of(self, name: str) -> int:
        """Returns the place on the axis whose copy of a parameter counts. See [Note: held twice]."""
        return self._first_holder[name]

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
                dist.all_reduce(local_part(param.grad), group=self._groups[tuple(self._shared[name])])
                if before is not None:
                    param.grad = before.add_(param.grad)

    def _shared_parameters(self) -> dict[str, nn.Parameter]:
        params = dict(self._module.named_parameters())
        return {
            name: params[name]
            for name, held in self._shared.items()
            if self.axis.rank in held and params[name].requires_grad
        }

    def _holders_of(self, name: str) -> list[int]:
        """Returns the stages that hold a parameter; one that no forward used goes to the stage it stands in."""
        found, last = self._found, self.num_stages - 1
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
        for path, part in self._module.named_modules():
            names = [f"{path}.{leaf}" if path else leaf for leaf in part._parameters if part._parameters[leaf] is not None]
            outside = not path.startswith(f"{found.body}.")
            if not outside or not names or next(part.children(), None) is not None:
                continue
            if all(name in elsewhere for name in names):
                if path in found.before:
                    replaced.append(path)
            else:
                others.append(path)
        own = self.ranges[number]
        return Stage(
            self._module, meta_module, number, found.body, own, own.stop == found.num_blocks, others, replaced
        )


def _with_tied_names(module: nn.Module, names: set[str]) -> frozenset[str]:
    """Returns the names with all other names of the same parameters."""
    by_id: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(param), []).append(name)
    return frozenset(name for same in by_id.values() if any(n in names for n in same) for name in same)


def _make_groups(sets: Sequence[tuple[int, ...]], axis: Axis) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Returns a process group for each set of places on the axis. A collective over all workers."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (dist.get_process_group_ranks(axis.group), [list(held) for held in sets]))
    made: set[tuple[int, ...]] = set()
    for ranks, wanted in every:
        for held in wanted:
            members = tuple(ranks[place] for place in held)
            if members in made:
                continue
            made.add(members)
            group = dist.new_group(list(members))
            if dist.get_rank() in members:
                groups[tuple(held)] = group
    return groups


def attach(module: nn.Module, stages: Stages) -> None:
    """Makes `stages_of(module)` return `stages`."""
    object.__setattr__(module, _ATTRIBUTE, stages)


def stages_of(module: nn.Module) -> Stages | None:
    """Returns this worker's stages of the module, None where no pipeline was applied."""
    return module.__dict__.get(_ATTRIBUTE)
