"""Keras on PyTorch: calls that ask a layer for shapes stay in the script's process.

When a functional model is built, Keras calls each layer with stand-ins of tensors (`KerasTensor`), then with tensors on
meta, inside a scope that hides the layer's variables. None of them is data, so there is nothing for workers to compute.
Must not import keras before the script does.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from moreh_ap.patching import Patches


def install(patches: Patches) -> None:
    """Have layers called for shapes run in this process, now or when the script imports keras."""
    group = patches.group("A layer that is asked for shapes has no data, which workers would need.")

    def teach(layers: ModuleType) -> None:
        keras_tensors = importlib.import_module("keras.src.backend.common.keras_tensor")
        scopes = importlib.import_module("keras.src.backend.common.stateless_scope")

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            """Calls the layer in this process if only shapes are asked for."""
            if scopes.in_stateless_scope() or keras_tensors.any_symbolic_tensors(args, kwargs):
                return layer.forward(*args, **kwargs)
            return original_call(layer, *args, **kwargs)

        original_call = group.replace(layers.TorchLayer, "__call__", call)

    group.when_imported("keras.src.backend.torch.layer", teach)
