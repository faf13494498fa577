"""A model's first call as workers need it to cut the model into stages: its tensors, and how they nest."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moreh_ap.device.tensor import on_host
from moreh_ap.errors import PlanError
from moreh_ap.protocol.messages.models import ExampleCall
from moreh_ap.protocol.messages.tensors import TensorData, TensorSlot
from moreh_ap.protocol.pytree import flatten, pickle_for_others, pickle_treespec


def example_of(root: nn.Module, call: tuple[nn.Module, Any, Any]) -> ExampleCall:
    """Returns the call as it travels.

    Args:
        root: The model.
        call: The module that was called, its positional and its keyword arguments.

    Raises:
        PlanError: A submodule was called, not the model.
    """
    module, args, kwargs = call
    if module is not root:
        raise PlanError(
            f"a pipeline is cut at the first call of the model, and a part of it ({type(module).__name__}) came first",
            "a first call of the model itself",
            f"model(...)  # model: the {type(root).__name__}",
        )
    leaves, treespec = flatten((args, kwargs))
    constants = [TensorSlot() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tensors = (TensorData.of(on_host(leaf)) for leaf in leaves if isinstance(leaf, Tensor))
    return ExampleCall(pickle_treespec(treespec), pickle_for_others(constants), tuple(tensors))
