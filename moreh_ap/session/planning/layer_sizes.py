"""How many elements the layers of a call read and write: found by running it on tensors without values.

Decides which models are run so, and what a layer's size is. Must not know what is made of the sizes.

[Note: sizes of layers]
A layer of a transformer sees as many positions as the call has. One of a network for pictures or sound sees fewer, the
deeper it is: of a ResNet's 96 x 96 pixels, the layers with most parameters see 3 x 3; of a vision transformer's, one in
256. Only the forward itself tells how many. So a model with convolutions is run once in the controller, on the `meta`
device, where tensors have a shape and no memory, and operations compute shapes alone. What the forward changes on its
modules and in random streams is put back, and what it prints is dropped. A forward that needs values, or fails in
another way, tells nothing; neither are forwards run that write variables outside of the model, or meet hooks of the
script.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from moreh_ap.device.function_mode import without_redirection
from moreh_ap.protocol.rng_state import set_state_of_host, state_of_host
from moreh_ap.protocol.script_code.script_globals import written_by
from moreh_ap.session.models.script_hooks import has_hooks_of_script
from moreh_ap.session.module_contents import ModuleContents

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass
class LayerSize:
    """Elements in one call, of all rows: of the first tensor that a layer gets, and of the first that it returns."""

    read: int = 0
    written: int = 0


def layer_sizes(
    root: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, LayerSize]:
    """Returns the sizes of all modules that a call runs, by ``id``; empty where positions alone say them, or unknown.

    Args:
        root: The model.
        module: The module that is called: the model or a part of it.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    if not any(isinstance(part, (*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS)) for part in root.modules()):
        return {}
    sizes: dict[int, LayerSize] = {}
    with _noting(module, sizes):
        found = result_without_values(root, module, args, kwargs)
    return {} if found is NotImplemented else sizes


def result_without_values(root: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a call gives, its tensors without values; NotImplemented where its forward needs them.

    Args:
        root: The model.
        module: The module that is called: the model or a part of it.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    if has_hooks_of_script(root) or any(True for _ in written_by(root)):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        state = {name: _without_values(one) for name, one in [*module.named_parameters(), *module.named_buffers()]}
        given = tree_map_only(Tensor, _without_values, (args, kwargs))
    with _unnoticed(module), torch.no_grad(), without_redirection():
        try:
            return torch.func.functional_call(module, state, *given)
        except Exception:  # of any class: it is the model's code, and the tensors have no values
            return NotImplemented


@contextlib.contextmanager
def _noting(module: nn.Module, sizes: dict[int, LayerSize]) -> Iterator[None]:
    def note(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        size = sizes.setdefault(id(part), LayerSize())
        size.read += _first_size((args, kwargs))
        size.written += _first_size(result)

    hooks = [part.register_forward_hook(note, with_kwargs=True) for part in module.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _unnoticed(module: nn.Module) -> Iterator[None]:
    """Undoes what a forward changes, and drops what it prints and warns of."""
    contents, stream, host = ModuleContents(module.modules()), torch.default_generator.get_state(), state_of_host()
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        contents.put_back()
        torch.default_generator.set_state(stream)
        set_state_of_host(host)


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _first_size(value: Any) -> int:
    return next((leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), 0)
