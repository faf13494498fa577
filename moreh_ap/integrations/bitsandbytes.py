"""Weights of 4 and 8 bits, as bitsandbytes packs them: refused on the accelerator.

A packed weight is quantized where it moves, by code of that library, into a tensor of another shape beside constants
that it keeps in Python attributes. Workers cannot be told of it. Its optimizers are another matter: they work.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from moreh_ap.errors import UnsupportedError
from moreh_ap.patching import Patches

_PACKED = ("Params4bit", "Int8Params")
_QUANTIZERS = ("Bnb4BitHfQuantizer", "Bnb8BitHfQuantizer")


def install(patches: Patches) -> None:
    """Has weights of 4 and 8 bits refused where they would move to the accelerator, or be loaded there."""
    moving = patches.group("Weights of 4 and 8 bits are refused on the accelerator.")

    def redirect_weights(modules: ModuleType) -> None:
        for name in _PACKED:
            cls = getattr(modules, name)
            move = _refusing(cls.to, name)
            moving.replace(cls, "to", move, "Refuses a move to the accelerator, which would quantize there.")

    def redirect_loading(modeling: ModuleType) -> None:
        original = modeling.get_hf_quantizer

        @functools.wraps(original)
        def find_quantizer(*args: Any, **kwargs: Any) -> Any:
            quantizer, _, device_map = found = original(*args, **kwargs)
            if type(quantizer).__name__ in _QUANTIZERS and str(device_map) not in ("cpu", "{'': 'cpu'}"):
                raise refusal(type(quantizer.quantization_config).__name__)
            return found

        moving.replace(modeling, "get_hf_quantizer", find_quantizer, "Refuses to load weights of 4 or 8 bits there.")

    moving.when_imported("bitsandbytes.nn.modules", redirect_weights)
    moving.when_imported("transformers.modeling_utils", redirect_loading)


def refusal(what: str) -> UnsupportedError:
    """Returns the error for packed weights of a class, or what asks for them."""
    return UnsupportedError(
        f"{what} of bitsandbytes: weights of 4 or 8 bits on the accelerator, whose workers do not unpack them.",
        allowed="Frozen weights in bfloat16, which the planner counts as such.",
        fix="AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)  # without quantization_config",
    )


def _refusing(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None and device.type == "cuda":
            raise refusal(name)
        return original(self, *args, **kwargs)

    return to
