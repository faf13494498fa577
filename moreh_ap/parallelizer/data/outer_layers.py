"""Large layers outside of a model's blocks, the embedding and the head, as units of FSDP2 of their own.

Decides which layers are gathered for their own call instead of with the rest of the model, and what happens where their
parameters are read outside of it. Must not know plans, batches or losses.

[Note: read outside of its call]
FSDP2 gathers a unit before its call, frees it afterwards, gathers it again when a gradient comes to its output, and
reduces its gradients when one has come to its inputs. A forward that reads `head.weight` without calling the head, as
fused losses and penalties do, does none of that. So the parameters of such a layer lie in a dict that notices who reads
them: the first read during a forward, by the layer's name, by `parameters()` or otherwise, has the layer join the rest
of the model for good. It is gathered there and then, on every worker, since all run the same forward; it stays gathered
until the end of the backward, or is gathered again when the backward begins; and its gradients are reduced when all of
them have come. So the call that reads first is as right as those that follow: what is lost is memory, not exactness.

[Note: worth a unit]
A unit costs two gathers and a reduction more a step, each with a latency of some 50 us between GPUs. A layer of 2**24
parameters has 32 MiB in bfloat16, which take about as long to travel at 600 GB/s. A smaller one would save less memory
than a block takes, and more time would be spent waiting than moving bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils._pytree import tree_leaves

LEAST_PARAMETERS = 2**24
"""How many parameters a layer has at least to be a unit. See [Note: worth a unit]."""

_PLAIN_FORWARDS = (nn.Embedding.forward, nn.Linear.forward)
"""Forwards that keep their parameters to themselves."""

_OWN_READS: list[bool] = []


def outer_layers(root: nn.Module, blocks: Iterable[nn.Module], ignored: Collection[nn.Parameter]) -> list[nn.Module]:
    """Returns the layers of `root` that are worth a unit of their own, beside `blocks`.

    A layer that shares a parameter with another one (tied weights) stays with the rest of the model, and so does one
    that writes its parameters while it runs (`max_norm`). Without blocks there is nothing that is gathered in turn.
    """
    inside = {id(submodule) for block in blocks for submodule in block.modules()}
    if not inside:
        return []
    uses = Counter(id(p) for module in root.modules() for p in module._parameters.values() if p is not None)
    left_out = {id(parameter) for parameter in ignored}
    found = []
    for module in root.modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if (
            id(module) not in inside
            and module is not root
            and getattr(type(module), "forward", None) in _PLAIN_FORWARDS
            and next(module.children(), None) is None
            and getattr(module, "max_norm", None) is None
            and sum(parameter.numel() for parameter in own) >= LEAST_PARAMETERS
            and all(uses[id(parameter)] == 1 and id(parameter) not in left_out for parameter in own)
        ):
            found.append(module)
    return found


@contextmanager
def unnoticed() -> Iterator[None]:
    """Inside, reads of parameters are this package's own: they are not what a forward computes with."""
    _OWN_READS.append(True)
    try:
        yield
    finally:
        _OWN_READS.pop()


def watch(root: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Has units that `fully_shard` made of layers join `root` once read. See [Note: read outside of its call]."""
    units = [_Unit(layer) for layer in layers]

    def gather_again(gradient: torch.Tensor) -> None:
        for unit in units:
            if unit.has_joined:
                unit.layer.unshard()

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and any(unit.has_joined for unit in units):
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(gather_again)

    if units:
        root.register_forward_hook(after_forward)


class _Unit:
    """A layer that is a unit of its own until its parameters are read outside of its call.

    Args:
        layer: What `fully_shard` made of it.

    Attributes:
        layer: The same.
        has_joined: Whether it is gathered and reduced with the rest of the model.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.has_joined = False
        self._state = layer._get_fsdp_state()
        object.__setattr__(layer, "_parameters", WatchedParameters(layer._parameters, self.note_read))

    def note_read(self) -> None:
        """Joins the rest of the model if a forward is under way that is not the layer's own."""
        state = self._state
        own_call = state._training_state is TrainingState.FORWARD
        if own_call or state._state_ctx.iter_forward_root is None:
            return
        if not self.has_joined:
            self._join()
        self.layer.unshard()

    def _join(self) -> None:
        self.has_joined = True
        self.layer.set_reshard_after_forward(False, recurse=False)
        groups = getattr(self._state, "_fsdp_param_groups", None)  # torch 2.13
        for group in [self._state._fsdp_param_group] if groups is None else groups:
            group.post_backward = _at_the_end(group.post_backward)


def _at_the_end(reduce: Any) -> Any:
    """Returns `reduce`, passed over while a backward is under way: more gradients may come."""

    def post_backward(*unused: Any) -> None:
        if torch._C._current_autograd_node() is None:
            reduce(*unused)

    return post_backward


class WatchedParameters(dict[str, Any]):
    """The parameters of a module, of which each read is noticed that is not this package's own.

    Args:
        own: The parameters.
        on_read: Called before one is read.
    """

    def __init__(self, own: dict[str, Any], on_read: Callable[[], None]) -> None:
        super().__init__(own)
        self._on_read = on_read

    def _note_read(self) -> None:
        if not _OWN_READS:
            self._on_read()

    def __getitem__(self, name: str) -> Any:
        self._note_read()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._note_read()
        return super().get(name, default)

    def values(self) -> Any:
        self._note_read()
        return super().values()

    def items(self) -> Any:
        self._note_read()
        return super().items()

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # keeps `dict(self)` from copying what it was not told of
