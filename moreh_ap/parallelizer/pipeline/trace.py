"""Follows a forward on meta tensors to see where in the body of a model each parameter is used.

Decides what the body is (the one list of blocks) and which part of a forward needs which parameter. Must not know how
many stages there will be, or who holds what.

[Note: places]
A forward with blocks 0 ... n-1 has n + 1 places. Place i is everything after block i - 1 up to the end of block i: what
comes before the first block belongs to place 0. Place n is everything after the last block. A parameter used in two
places (a tied embedding: places 0 and n) is listed with both.

[Note: what crosses a border]
Between two stages what a block returned travels, and what it was given if that is used again (`x = x + block(x)`). A
value that depends on parameters and was made in place p may be used in place p, and in place p + 1 if block p returned
it or was given it. Anything else (an embedding added in every block, the routers of all layers in one loss) would need
more than a pipeline sends, and is refused.

[Note: direct use]
Code between modules, in the forward of a module that has submodules, runs on every stage that a pipeline makes, with
placeholders where a value comes from another stage. A parameter that such code uses directly (`self.positions[:, :n]`)
must exist wherever the code runs. A parameter that belongs to a module without submodules is used only where that
module is called, and the whole module can be replaced elsewhere. A module inside a block cannot: it is absent with its
block, so a forward that calls it by itself, or none of the block's hooks (`block.forward(x)`), is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from moreh_ap.errors import PlanError
from moreh_ap.parallelizer.loss.meta_reduction import MetaReduction
from moreh_ap.protocol.blocks import block_lists
from moreh_ap.protocol.script_code.script_functions import behind_own_call

_WITHOUT_PIPELINE = ("plans with pipeline=1 for this model, such as replicate, shard or tensor", 'plan="shard=2"')


class Uncuttable(Exception):
    """What the text says lies on both sides of a border. See [Note: what crosses a border], [Note: direct use]."""


@dataclass(frozen=True)
class Trace:
    """Where a model uses its parameters. See [Note: places], [Note: direct use].

    Attributes:
        body: Path of the list of blocks.
        num_blocks: Number of blocks in it.
        places: Name of each parameter that is used -> the places that use it. Tied parameters have one name.
        direct: Names of parameters that code between modules uses.
        carried: Which of a block's arguments are used again after it, as numbers of the leaves of (args, kwargs).
        before: Paths of modules without submodules that are called outside the blocks, before the end of the last one.
    """

    body: str
    num_blocks: int
    places: dict[str, frozenset[int]]
    direct: frozenset[str]
    carried: tuple[int, ...]
    before: frozenset[str]


def find_body(module: nn.Module) -> tuple[str, int]:
    """Returns the path of the only list of blocks, and their number.

    Raises:
        PlanError: There is no list of blocks, or there are several (an encoder and a decoder).
    """
    lists = block_lists(module)
    if len(lists) == 1:
        return next((path, len(blocks)) for path, blocks in lists.items())
    found = f"{len(lists)} ({', '.join(lists)})" if lists else "none"
    raise PlanError(
        f"a pipeline needs one list of equal blocks, {type(module).__name__} has {found}",
        *_WITHOUT_PIPELINE,
    )


def trace(meta_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> Trace:
    """Returns where `meta_module` uses its parameters when it is called so.

    Args:
        meta_module: The model on meta, without a plan.
        args: Positional arguments of a call as the script makes it, with values.
        kwargs: Keyword arguments, likewise.
        device: Where real tensors are.

    Raises:
        PlanError: The model has no single body, or its forward needs values that meta tensors do not have.
    """
    body, num_blocks = find_body(meta_module)
    try:
        return _follow(meta_module, body, num_blocks, args, kwargs, device)
    except Uncuttable as found:
        raise PlanError(f"a pipeline cannot cut {type(meta_module).__name__}: {found}", *_WITHOUT_PIPELINE) from None
    except Exception as error:  # any error of the user's forward, which may ask a meta tensor for a value
        raise PlanError(
            f"a pipeline needs a forward that can be followed without values, {type(meta_module).__name__}'s raised "
            f"{type(error).__name__}: {error}",
            *_WITHOUT_PIPELINE,
        ) from error


def trace_again(
    cut: Trace, meta_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> Trace | None:
    """Returns where another call uses parameters of a model that was cut as `cut` says; None if that cannot be told.

    Raises:
        Uncuttable: No pipeline can run the call.
    """
    try:
        return _follow(meta_module, cut.body, cut.num_blocks, args, kwargs, device)
    except Uncuttable:
        raise
    except Exception:  # any error of the user's forward, which may ask a meta tensor for a value: the stages show it
        return None


def _follow(
    meta_module: nn.Module,
    body: str,
    num_blocks: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> Trace:
    recorder = _Recorder(meta_module, body)
    with torch.no_grad(), recorder.hooks(), MetaReduction(device), recorder:
        behind_own_call(meta_module)(*args, **kwargs)
    recorder.check_end()
    places = {name: frozenset(used) for name, used in recorder.places.items()}
    direct, before = frozenset(recorder.direct), frozenset(recorder.before)
    return Trace(body, num_blocks, places, direct, tuple(sorted(recorder.carried)), before)


class _Recorder(TorchFunctionMode):
    """Notes each parameter that a torch function is given, with the place and the innermost module."""

    def __init__(self, module: nn.Module, body: str) -> None:
        super().__init__()
        self.places: dict[str, set[int]] = {}
        self.direct: set[str] = set()
        self.carried: set[int] = set()
        self.before: set[str] = set()
        self._module, self._body = module, body
        self._blocks: list[nn.Module] = list(module.get_submodule(body).children())
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._stack: list[nn.Module] = []
        self._place = 0
        self._inside = False
        # Tensors that depend on parameters -> the place that made them; the tensors are kept, so that ids stay theirs.
        self._made: dict[int, tuple[int, Tensor]] = {}
        self._returned: dict[int, int] = {}
        self._given: dict[int, tuple[int, int]] = {}  # block, and which of its arguments

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        tree_map_only(Tensor, tensors.append, (args, kwargs))
        result = func(*args, **kwargs)
        if isinstance(result, (Tensor, tuple, list)):
            depends = [self._note(tensor) for tensor in tensors]
            if any(depends):
                tree_map_only(Tensor, lambda made: self._made.setdefault(id(made), (self._place, made)), result)
        return result

    def _note(self, tensor: Tensor) -> bool:
        """Notes the use of a tensor, and returns whether it depends on parameters."""
        made = self._made.get(id(tensor))
        if made is not None:
            place = made[0]
            if self._place == place or self._returned.get(id(tensor), -1) == self._place - 1:
                return True
            block, argument = self._given.get(id(tensor), (-1, -1))
            if block == self._place - 1:
                self.carried.add(argument)
            else:
                where = "after the last block" if self._place == len(self._blocks) else f"in block {self._place}"
                raise Uncuttable(f"what was computed before the end of block {place} is used again {where}")
            return True
        name = self._names.get(id(tensor))
        if name is None:
            return False
        self.places.setdefault(name, set()).add(self._place)
        if not self._inside:
            if not self._stack or next(self._stack[-1].children(), None) is not None:
                self.direct.add(name)
            elif name.startswith(f"{self._body}."):
                raise Uncuttable(f"a part of a block ({name.rpartition('.')[0]}) is called outside of its block")
        return True

    def check_end(self) -> None:
        """Raises an error if the forward, which has ended, did not call every block."""
        if self._place < len(self._blocks):
            raise Uncuttable(f"its forward does not call block {self._place} of {self._body}")

    def hooks(self) -> ExitStack:
        """Returns a context in which calls of modules move the recorder from place to place."""
        stack = ExitStack()
        paths = {id(submodule): path for path, submodule in self._module.named_modules()}
        for submodule in self._module.modules():
            stack.callback(submodule.register_forward_pre_hook(self._enter(paths[id(submodule)])).remove)
            stack.callback(submodule.register_forward_hook(self._leave, always_call=True).remove)
        for index, block in enumerate(self._blocks):
            stack.callback(block.register_forward_pre_hook(self._begin_block(index), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(self._end_block(index)).remove)
        return stack

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(submodule: nn.Module, args: Any) -> None:
            self._stack.append(submodule)
            if not self._inside and self._place < len(self._blocks) and next(submodule.children(), None) is None:
                self.before.add(path)

        return enter

    def _leave(self, submodule: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def _begin_block(self, index: int) -> Callable[..., None]:
        def begin(block: nn.Module, args: Any, kwargs: Any) -> None:
            for number, leaf in enumerate(tree_leaves((args, kwargs))):
                self._given[id(leaf)] = (index, number)
            if self._place != index:
                raise Uncuttable(f"its forward calls block {index} where block {self._place} is next")
            self._inside = True

        return begin

    def _end_block(self, index: int) -> Callable[..., None]:
        def end(block: nn.Module, args: Any, output: Any) -> None:
            self._inside, self._place = False, index + 1
            tree_map_only(Tensor, lambda leaf: self._returned.__setitem__(id(leaf), index), output)

        return end
