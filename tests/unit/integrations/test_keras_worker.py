"""Losses that Keras layers add during a call, with a stand-in of the modules of Keras."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

from moreh_ap.integrations import keras_worker
from moreh_ap.patching import Patches


class Layer:
    def __init__(self):
        self.losses = []

    def add_loss(self, loss):
        self.losses.append(loss)


def test_a_layer_s_loss_goes_to_the_model_that_is_called_and_outside_of_a_call_to_the_layer(monkeypatch):
    layers, states, context = ModuleType("layer"), ModuleType("global_state"), {}
    layers.Layer, states.get_global_attribute = Layer, context.get
    monkeypatch.setitem(sys.modules, "keras.src.layers.layer", layers)
    monkeypatch.setitem(sys.modules, "keras.src.backend.common.global_state", states)
    patches, model, layer = Patches(), Layer(), Layer()
    keras_worker.install(patches)
    layer.add_loss(1)
    context["current_call_ctx"] = SimpleNamespace(entry_layer=model)
    layer.add_loss(2)
    patches.undo()
    layer.add_loss(3)
    assert (layer.losses, model.losses) == ([1, 3], [2])
