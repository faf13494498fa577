"""What a forward keeps in attributes for the next one: ``self.hidden = hidden``.

[Note: kept values]
In a split call each worker sets an attribute to its rows, or to its share of a sum, of what one device would have.
That does no harm while no forward reads it (weights of attention, a loss). A forward that reads it gets it as one more
argument: it is sliced as arguments are, is part of the split check, and gradients flow back through it to the call that
set it. A buffer in which a forward keeps a result with its graph is such an attribute from then on.

[Note: rows in an attribute]
A script may set such a value itself, before each call: ``model.hidden = (torch.zeros(1, rows, 12), ...)``. Where a call
cannot be split otherwise, attributes that have as many entries as the batch has rows are passed in the same way.

[Note: trained by the script]
An attribute may be a tensor that requires a gradient and is no parameter: the weights of operations that DARTS searches
(``self.alphas = torch.randn(14, 8, requires_grad=True)``), which an optimizer of the script steps. It is passed from
the first call on, so that its gradient comes back, and that each call has its value of now.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.protocol.module_attributes import own_attributes

PASSED_STATE = "attributes that earlier forwards have set"
"""The keyword under which they are passed, ``{path and name: value}``; no forward has an argument of that name."""


def names_with_rows(root: nn.Module, rows: int, first: Any) -> set[str]:
    """Returns the paths and names of attributes with tensors of two or more dims, of which one may count the rows.

    Args:
        root: The model.
        rows: Rows of the batch, as its first dim counts them.
        first: The first leaf of the arguments, whose second dim may count them instead.
    """
    sizes = {rows, *(first.shape[1:2] if isinstance(first, Tensor) else ())}
    state = [(name, tensor) for name, tensors in _state(root) for tensor in tensors if tensor.ndim > 1]
    return {name for name, tensor in state if not sizes.isdisjoint(tensor.shape)}


def keeps_tensors(root: nn.Module) -> bool:
    """Returns whether a part of a model has tensors in attributes that are neither parameters nor buffers."""
    return any(True for _ in _state(root))


def trained_attributes(root: nn.Module) -> dict[str, set[str]]:
    """Returns the paths and names of attributes that the script trains, by the path of each module that has them in it.

    See [Note: trained by the script]. Buffers that carry a graph are among them.
    """
    found: dict[str, set[str]] = {}
    for name, tensors in _state(root):
        add_trained(found, name, tensors)
    for name in buffers_with_graphs(root):
        _add(found, name)
    return found


def buffers_with_graphs(root: nn.Module) -> set[str]:
    """Returns the names of buffers in which a forward has kept a result from which gradients flow back."""
    with torch._C.DisableTorchFunctionSubclass():
        return {name for name, buffer in root.named_buffers() if buffer.grad_fn is not None}


def add_trained(found: dict[str, set[str]], name: str, value: Any) -> bool:
    """Adds an attribute to what `trained_attributes` returns if the script trains it; returns whether it does."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    has_parameters = any(isinstance(leaf, nn.Parameter) for leaf in leaves)
    with torch._C.DisableTorchFunctionSubclass():
        is_trained = not has_parameters and any(leaf.requires_grad and leaf.is_leaf for leaf in leaves)
    if is_trained:
        _add(found, name)
    return is_trained


def _add(found: dict[str, set[str]], name: str) -> None:
    """Adds an attribute under the path of each module that has it in it."""
    parts = name.split(".")
    for number in range(len(parts)):
        found.setdefault(".".join(parts[:number]), set()).add(name)


def _state(root: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """Yields attributes with tensors. One that has the model's own in a container, as TensorDict does, is no state."""
    own = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    for path, submodule in root.named_modules():
        for name, value in own_attributes(submodule).items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if tensors and not any(isinstance(one, nn.Parameter) or id(one) in own for one in tensors):
                yield f"{path}.{name}" if path else name, tensors
