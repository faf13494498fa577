"""Keras on PyTorch, on a worker: losses that layers add go to the model that is called.

`add_loss` appends to a list of its layer. Layers of a functional model are in a list of Keras, not among the parts that
PyTorch knows, so what they keep would stay on the workers. `losses` of a model has those of all its layers.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from moreh_ap.patching import Patches


def install(patches: Patches) -> None:
    """Have layers add losses to the called model, now or when keras is imported."""
    group = patches.group("The script gets what a forward adds to lists of the called model.")

    def teach(layers: ModuleType) -> None:
        states = importlib.import_module("keras.src.backend.common.global_state")

        def add_loss(layer: Any, loss: Any) -> None:
            """Adds a loss, or several, to the model that is called, or to the layer outside of a call."""
            context = states.get_global_attribute("current_call_ctx")
            called = None if context is None else context.entry_layer
            original(layer if called is None else called, loss)

        original = group.replace(layers.Layer, "add_loss", add_loss)

    group.when_imported("keras.src.layers.layer", teach)
