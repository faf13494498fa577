"""Blocks whose parts a forward uses itself, instead of calling the block, under plans that shard.

Decides which blocks these are and how the rest of the model takes them in. Must not know plans, batches or losses.

[Note: opened]
FSDP2 gathers a block for the block's own forward. A forward that calls a part of it (`block.norm(x)`), calls
`block.forward(x)`, which runs no hook, or reads `block.weight`, would find a shard. Trials of a forward notice it: the
parameters of blocks lie in dicts that notice who reads them while a trial runs, and at no other time. A block that is
opened so is gathered there and then, for the trial to go on to the next one; after that forward, all that were
opened join the rest of the model for good, and the trial begins again. Their shards stay the same objects, so
an optimizer's state still fits. They are gathered with the rest of the model before a forward, freed behind it, and
gathered and reduced with it in the backward: what is lost is memory, not exactness.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.data.fsdp import fsdp_modules, fsdp_roots, param_groups, set_param_groups, settle
from moreh_ap.parallelizer.data.outer_layers import WatchedParameters
from moreh_ap.parallelizer.mesh import Axis

_P = ParamSpec("_P")
_T = TypeVar("_T")


class BlocksOpened(Exception):
    """A forward of a trial has used parts of blocks. Raised behind it."""


def joining_opened(trial: Callable[Concatenate[Call, _P], _T]) -> Callable[Concatenate[Call, _P], _T]:
    """Has blocks join the rest of the model that forwards of `trial` open, and the trial begin again then. See [Note:
    opened]. A collective under plans that shard."""

    @functools.wraps(trial)
    def run(call: Call, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not fsdp_roots(call.module):
            return trial(call, *args, **kwargs)
        while True:
            found = []
            with noticing(call.module) as opened, suppress(BlocksOpened):
                found.append(trial(call, *args, **kwargs))
            names = _on_all_workers(opened, call.axis)
            if not names:
                return found[0]
            join(call.module, names)

    return run


@contextmanager
def noticing(module: nn.Module) -> Iterator[list[str]]:
    """Gives the names of the blocks that forwards inside have opened, or their backwards (those of reversible layers).

    A forward that opens some raises at its end.

    Raises:
        BlocksOpened: A forward has run through, and blocks were opened.
    """
    opened: dict[str, None] = {}
    under_way: list[nn.Module] = []
    found: list[str] = []

    def begin(root: nn.Module, args: Any) -> None:
        under_way[:] = [root]

    def end(root: nn.Module, args: Any, output: Any) -> None:
        under_way.clear()
        if opened:
            raise BlocksOpened

    def leave(root: nn.Module, args: Any, output: Any) -> None:
        under_way.clear()  # also after an error, when what was there before is put back

    def note_read(name: str, block: Any, state: Any) -> None:
        is_in_backward = torch._C._current_graph_task_id() != -1 and state._training_state is TrainingState.IDLE
        if is_in_backward or (under_way and state._training_state is not TrainingState.FORWARD):
            opened[name] = None
            block.unshard()

    with ExitStack() as active:
        for root in fsdp_roots(module):
            active.callback(root.register_forward_pre_hook(begin).remove)  # type: ignore[attr-defined]
            active.callback(root.register_forward_hook(end).remove)  # type: ignore[attr-defined]
            active.callback(root.register_forward_hook(leave, always_call=True).remove)  # type: ignore[attr-defined]
        for name, block in blocks_apart(module).items():
            on_read = partial(note_read, name, block, block._get_fsdp_state())
            for owner in _owners(block):
                active.enter_context(_watched(owner, on_read))
        try:
            yield found
        finally:
            found += opened


def blocks_apart(module: nn.Module) -> dict[str, FSDPModule]:
    """Returns the blocks that FSDP2 gathers by themselves, by name.

    Batch normalisations, which have a precision of their own, are none, nor are large layers beside the blocks, which
    notice reads at all times (`outer_layers.py`).
    """
    roots = fsdp_roots(module)
    apart = [one for one in fsdp_modules(module) if one not in roots and param_groups(one)]
    precision = [root._get_fsdp_state()._mp_policy for root in roots]
    blocks = {id(one) for one in apart if one._get_fsdp_state()._mp_policy in precision}
    return {name: one for name, one in module.named_modules() if id(one) in blocks}  # type: ignore[misc]


def _owners(block: FSDPModule) -> list[nn.Module]:
    """Returns the modules in a block that have parameters which are gathered with it, not by themselves."""
    inside = [one for one in block.modules() if one._parameters]  # type: ignore[attr-defined]
    return [one for one in inside if one is block or not (isinstance(one, FSDPModule) and param_groups(one))]


@contextmanager
def _watched(owner: nn.Module, on_read: Callable[[], None]) -> Iterator[None]:
    """Has reads of the parameters that a module has itself noticed inside."""
    own = owner._parameters
    watched = WatchedParameters(own, on_read)
    object.__setattr__(owner, "_parameters", watched)
    try:
        yield
    finally:
        own.clear()
        own.update(dict.items(watched))
        object.__setattr__(owner, "_parameters", own)


def _on_all_workers(names: list[str], axis: Axis) -> list[str]:
    """Returns the names that any worker has which shares the batch, in the same order on all. A collective."""
    if axis.size == 1:
        return sorted(names)
    gathered: list[list[str]] = [[] for _ in range(axis.size)]
    dist.all_gather_object(gathered, names, group=axis.group)
    return sorted({name for each in gathered for name in each})


def join(module: nn.Module, names: list[str]) -> None:
    """Has blocks join the rest of the model, or of the stage that they are in."""
    settle(module)
    blocks = blocks_apart(module)
    for group in (group for submodule in fsdp_modules(module) for group in param_groups(submodule)):
        group.finalize_backward()  # a backward prefetches in the order of blocks in which the trial came to them
        group.comm_ctx.post_forward_order.clear()
    roots = {id(one): root for root in fsdp_roots(module) for one in root.modules()}  # type: ignore[attr-defined]
    for block in (blocks[name] for name in names if name in blocks):
        _join(roots[id(block)], block)


def _join(root: FSDPModule, block: FSDPModule) -> None:
    """Moves the parameters of a block to those of `root`, which are gathered and reduced in one exchange."""
    of_root, of_block = param_groups(root), param_groups(block)
    set_param_groups(block, [])
    if not of_root:
        set_param_groups(root, of_block)
        return
    for group in of_block:
        of_root[0].fsdp_params += group.fsdp_params
        group.fsdp_params = []
    of_root[0].lazy_init()  # finds the dtype of the gradients: the root alone may have had none
