"""One stage of a pipeline: the model's own forward, run for the blocks that a worker holds.

Decides what replaces the modules of other stages. Must not know which worker holds which stage, micro-batches or
schedules.

[Note: the model's own forward]
No model is rewritten. Every stage runs the forward of the whole model, in which a block of an earlier stage passes its
input on, the last of them hands out what was received from the stage before, and after the stage's own last block the
forward is left by an exception that carries what that block returned. Modules outside the blocks whose parameters are
elsewhere (an embedding) return NaN in the right shape: what is computed from it must not matter, and if it does (a
model that feeds embeddings into its last layer), the loss says so at once instead of being wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from moreh_ap.parallelizer.tensor.crossing import Crossing
from moreh_ap.parallelizer.tensor.sequence import splits
from moreh_ap.parallelizer.tensor.split_tensor import SplitTensor, gather_split_tensors
from moreh_ap.protocol.script_code.script_functions import behind_own_call


@dataclass(frozen=True)
class Travelling:
    """Stands for a tensor that travels between stages.

    Attributes:
        length: How long it is along the sequence (dim 1), where each rank of the tensor axis has and sends a shard of
            that; None where it travels in full.
    """

    length: int | None


class Nesting:
    """How what travels makes up a block's result, and how much else travels with it.

    No dataclass: it is an argument of a stage, and FSDP2 opens dataclasses among arguments to find tensors to cast.

    Args:
        leaves: The leaves of the result, with None in place of each tensor.
        is_tensor: For each leaf whether it is a tensor.
        treespec: How the leaves nest.
        marks: One for each tensor that travels: those of the result first, then what the block was given.
    """

    def __init__(
        self,
        leaves: tuple[Any, ...],
        is_tensor: tuple[bool, ...],
        treespec: TreeSpec,
        marks: tuple[Travelling, ...],
    ) -> None:
        self.leaves, self.is_tensor, self.treespec, self.marks = leaves, is_tensor, treespec, marks

    @property
    def num_returned(self) -> int:
        """Number of tensors in the result."""
        return sum(self.is_tensor)

    def nest(self, tensors: Iterator[Tensor]) -> Any:
        """Returns the result with these tensors in it."""
        filled = [next(tensors) if here else leaf for leaf, here in zip(self.leaves, self.is_tensor, strict=True)]
        return tree_unflatten(filled, self.treespec)


class _StageEnd(BaseException):
    """Leaves a forward after the stage's last block; carries what that block returned."""

    def __init__(self, result: Any, carried: list[Tensor]) -> None:
        super().__init__()
        self.result, self.carried = result, carried


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
        carried: Which arguments of a block are used again after it, see `Trace`.

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
        carried: tuple[int, ...],
    ) -> None:
        super().__init__()
        blocks = list(model.get_submodule(body).children())
        self.index, self.own, self.is_last, self.carried = index, own, is_last, carried
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
            placeholders[(body, names[own.stop - 1])] = _Border(blocks[own.stop - 1], self)
        for path in replaced:
            parent, _, leaf = path.rpartition(".")
            placeholders[(parent, leaf)] = _Elsewhere(meta_module.get_submodule(path))
        # In a tuple and not as children: the model contains this stage's modules, not the other way round.
        self._whole = (model, placeholders)

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
        self._received, whole = (received, nesting), self._whole[0]
        run = whole if type(whole).__call__ is nn.Module.__call__ else behind_own_call(whole)
        try:
            with self._placed():
                return run(*args, **kwargs)
        except _StageEnd as end:
            leaves, spec = tree_flatten(end.result)
            travelling = [*_tensors(leaves), *end.carried]
            lengths = [self.split_length(leaf) for leaf in travelling]
            self.nesting = nesting_of(leaves, spec, lengths)
            return tuple(map(self._shard, travelling, lengths))
        finally:
            self._received = ((), None)

    def unpack(self) -> tuple[Any, list[Tensor]]:
        """Returns what the last block of the stage before returned, and what it was given that is used again."""
        tensors, nesting = self._received
        assert nesting is not None
        joined = list(map(self._gathered, tensors, nesting.marks))
        result = nesting.nest(iter(joined))
        return result, joined[nesting.num_returned :]

    def split_length(self, tensor: Tensor) -> int | None:
        """Returns how long a tensor is along its sequence if ranks have shards of it between blocks, else None."""
        is_hidden = tensor.ndim == 3 and tensor.is_floating_point()
        if self.crossing is None or not is_hidden or not splits(tensor.shape[1], self.crossing):
            return None
        return tensor.shape[1]

    def local_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Returns the shape of what travels of a tensor between blocks."""
        if self.crossing is None or self.split_length(tensor) is None:
            return tuple(tensor.shape)
        start, stop = self.crossing.shard_range(tensor.shape[1])
        return (tensor.shape[0], stop - start, *tensor.shape[2:])

    def _shard(self, tensor: Tensor, length: int | None) -> Tensor:
        """Returns what travels of a tensor: what every worker of the tensor axis can expect from its shape alone."""
        if length is None or self.crossing is None:
            return gather_split_tensors(tensor)
        if isinstance(tensor, SplitTensor) and tensor.split_dim == 1:
            return tensor.to_local()
        return self.crossing.take(gather_split_tensors(tensor), 1)

    def _gathered(self, shard: Tensor, mark: Travelling) -> Tensor:
        if mark.length is None:
            return shard
        assert self.crossing is not None
        return SplitTensor.from_local(shard, mark.length, 1, self.crossing)

    def pass_on(self, hidden: Tensor) -> Any:
        """Returns `hidden` in the nesting that blocks use."""
        _, nesting = self._received
        assert nesting is not None
        return nesting.nest(itertools.repeat(hidden))

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Puts placeholders where other stages' modules are."""
        model, placeholders = self._whole
        before: list[tuple[nn.Module, str, Any]] = []
        try:
            for (path, name), placeholder in placeholders.items():
                parent = model.get_submodule(path)
                before.append((parent, name, parent._modules[name]))
                parent._modules[name] = placeholder
            yield
        finally:
            for parent, name, module in before:
                parent._modules[name] = module


class _Placeholder(nn.Module):
    """Stands for a module; its attributes, parameters and submodules are that module's."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: vars(original)[name] for name in ("_parameters", "_buffers", "_modules")})
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
    """The last block of the stage before: returns what that block returned, and gives its arguments their values."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stage: Stage = self.__dict__["_stage"]
        result, carried = stage.unpack()
        leaves = tree_flatten((args, kwargs))[0]
        for number, value in zip(stage.carried, carried, strict=True):
            leaves[number].copy_(gather_split_tensors(value))  # the code after the block has this very tensor
        return result


class _Border(_PassOn):
    """The last block of a stage: runs, and leaves the model's forward with what it returned."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = tree_flatten((args, kwargs))[0]
        carried = [leaves[number] for number in self.__dict__["_stage"].carried]
        raise _StageEnd(self.__dict__["_original"](*args, **kwargs), carried)


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


def nesting_of(leaves: Sequence[Any], treespec: TreeSpec, lengths: Iterable[int | None]) -> Nesting:
    """Returns how a flattened result nests; `lengths` has the `Travelling.length` of each tensor that travels."""
    is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
    rest = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Nesting(rest, is_tensor, treespec, tuple(map(Travelling, lengths)))


def _tensors(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
