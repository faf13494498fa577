"""Weights of 4 bits of bitsandbytes in a worker: its layers find the constants of a weight beside them.

Must not import bitsandbytes: a model that has no layer of it does without.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def packed_layers(module: nn.Module) -> list[Any]:
    """Returns the layers of a model whose weights have 4 bits."""
    library = sys.modules.get("bitsandbytes.nn.modules")
    if library is None:
        return []
    return [layer for layer in module.modules() if isinstance(layer, library.Linear4bit)]


def complete_unpickled(module: nn.Module) -> None:
    """Has a model's packed weights have their constants at every call.

    A weight is an ordinary parameter here, and another one while FSDP2 has it gathered. The layer would otherwise put a
    parameter of the library's class in its place.
    """
    for layer in packed_layers(module):
        layer.register_forward_pre_hook(_give_constants)
        layer.support_avx512bf16_for_cpu = False  # its packing for evaluation would change the weight in forward


def _give_constants(layer: Any, args: object) -> None:
    layer.weight.quant_state = layer.quant_state
