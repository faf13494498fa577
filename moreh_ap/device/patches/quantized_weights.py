"""Weights of 4 bits on the accelerator, as bitsandbytes packs them. Those of 8 bits are refused.

[Note: packed weights]
A packed weight is a tensor of bytes beside constants, which the library keeps as Python attributes of the parameter and
of its layer (`quant_state`). The controller packs on the CPU, by the library's own code, so that every plan has the
bytes of one process; bytes and constants then move like other tensors. Workers get an ordinary parameter with the
bytes, and constants as an attribute of the layer. The library finds them there, as it does under FSDP
(`bitsandbytes_worker`).
"""

from __future__ import annotations

import copy
import functools
import types
from types import ModuleType
from typing import Any

import torch

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.transfers import is_accelerator, move
from moreh_ap.errors import UnsupportedError
from moreh_ap.patching import Patches

_OWN = ("_cell", "_user", "_is_param")
"""Attributes of a tensor on the accelerator that are not the library's."""


def install(patches: Patches) -> None:
    """Has weights of 4 bits packed and moved, and those of 8 bits refused."""
    packing = patches.group("Weights of 4 bits are packed in the controller; their bytes are on the accelerator.")
    moving = patches.group("Weights of 8 bits are refused on the accelerator.")

    def redirect_weights(modules: ModuleType) -> None:
        cls = modules.Params4bit
        packing.replace(cls, "to", _move_of(cls), "Packs on the CPU and moves the bytes.")
        packing.replace(cls, "__new__", staticmethod(_new_of(cls)), "Reads a weight that is to be packed.")
        packing.replace(cls, "__deepcopy__", _copy_of(cls), "Copies bytes and constants on the accelerator.")
        from_packed: Any = classmethod(_from_packed(cls.from_prequantized.__func__))
        packing.replace(cls, "from_prequantized", from_packed, "Moves a weight that was packed in its file.")
        move_8bit = _refusing(modules.Int8Params.to)
        moving.replace(modules.Int8Params, "to", move_8bit, "Refuses a move to the accelerator.")

    def redirect_loading(modeling: ModuleType) -> None:
        original = modeling.get_hf_quantizer

        @functools.wraps(original)
        def find_quantizer(*args: Any, **kwargs: Any) -> Any:
            quantizer, _, device_map = found = original(*args, **kwargs)
            if type(quantizer).__name__ == "Bnb8BitHfQuantizer" and str(device_map) not in ("cpu", "{'': 'cpu'}"):
                raise refusal(type(quantizer.quantization_config).__name__)
            return found

        moving.replace(modeling, "get_hf_quantizer", find_quantizer, "Refuses to load weights of 8 bits there.")

    packing.when_imported("bitsandbytes.nn.modules", redirect_weights)
    moving.when_imported("transformers.modeling_utils", redirect_loading)


def refusal(what: str) -> UnsupportedError:
    """Returns the error for weights of 8 bits of a class, or what asks for them."""
    return UnsupportedError(
        f"{what} of bitsandbytes: weights of 8 bits on the accelerator, whose workers do not unpack them.",
        allowed="Frozen weights of 4 bits, or in bfloat16.",
        fix="AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True))",
    )


def _refusing(original: Any) -> Any:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None and device.type == "cuda":
            raise refusal("Int8Params")
        return original(self, *args, **kwargs)

    return to


# -- weights of 4 bits; `cls` is the library's class of them -------------------------------------------------------


@functools.cache
def _on_accelerator(cls: type[torch.Tensor]) -> type[VirtualTensor]:
    """Returns the class of packed weights on the accelerator: the library's, and a virtual tensor."""
    body = {
        "__torch_function__": vars(VirtualTensor)["__torch_function__"],
        "__torch_dispatch__": vars(VirtualTensor)["__torch_dispatch__"],
        "__new__": staticmethod(lambda kind, *args, **kwargs: VirtualTensor.__new__(kind, *args, **kwargs)),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__reduce_ex__": VirtualTensor.__reduce_ex__,
        "cpu": cls.cpu,
        "cuda": cls.cuda,
        "detach": lambda self: _made_there(cls, self._cell, self, dict(vars(self))),
    }
    return types.new_class(cls.__name__, (cls, VirtualTensor), exec_body=lambda own: own.update(body))


@functools.cache
def _on_host(cls: type[torch.Tensor]) -> type[torch.Tensor]:
    """Returns the class of packed weights that have left the accelerator: the library's, kept by `detach`.

    `nn.Module.to` makes a parameter of what has moved, and requires that.
    """

    def detach(self: Any) -> Any:
        made = torch.Tensor._make_subclass(type(self), self.data, False)
        vars(made).update(vars(self))
        return made

    body = {"detach": detach, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return types.new_class(cls.__name__, (cls,), exec_body=lambda own: own.update(body))


def _move_of(cls: Any) -> Any:
    original = cls.to

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        is_there = isinstance(self, VirtualTensor)
        if device is None or device.type == "meta":
            return self if is_there else original(self, *args, **kwargs)
        if is_there and not is_accelerator(device):
            return _to_host(cls, self)
        if is_there or not is_accelerator(device):
            return self if is_there else original(self, *args, **kwargs)
        return _to_accelerator(cls, self if self.bnb_quantized else original(self, "cpu"))

    return to


def _to_accelerator(cls: Any, packed: Any) -> Any:
    """Returns a packed weight on the accelerator; its constants move in place, as the library's own move has it."""
    with torch.no_grad():
        value = move(torch.Tensor.detach(packed), "cuda")
    packed.quant_state.to("cuda")
    return _made_there(cls, value._cell, value, vars(packed))  # type: ignore[attr-defined]


def _made_there(cls: Any, cell: Any, like: torch.Tensor, attributes: dict[str, Any]) -> Any:
    """Returns a packed weight on the accelerator, with its value in `cell`."""
    there = VirtualTensor.__new__(_on_accelerator(cls), cell, like)
    vars(there).update({key: value for key, value in attributes.items() if key not in _OWN}, _is_param=True)
    return there


def _to_host(cls: Any, there: Any) -> Any:
    """Returns a packed weight on the CPU."""
    there.quant_state.to("cpu")
    made = torch.Tensor._make_subclass(_on_host(cls), there.to_host(), False)
    vars(made).update({key: value for key, value in vars(there).items() if key not in _OWN})
    return made


def _new_of(cls: Any) -> Any:
    original = cls.__new__

    @functools.wraps(original)
    def new(kind: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, VirtualTensor):
            return original(kind, data, *args, **kwargs)
        return original(cls, move(data.detach(), "cpu"), *args, **kwargs)

    return new


def _copy_of(cls: Any) -> Any:
    original = cls.__deepcopy__

    @functools.wraps(original)
    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        if not isinstance(self, VirtualTensor):
            return original(self, memo)
        copied = _made_there(cls, move(self.to_host(), "cuda")._cell, self, {})  # type: ignore[attr-defined]
        memo[id(self)] = copied
        vars(copied).update((key, copy.deepcopy(value, memo)) for key, value in vars(self).items() if key not in _OWN)
        return copied

    return deepcopy


def _from_packed(original: Any) -> Any:
    @functools.wraps(original)
    def from_prequantized(cls: Any, data: Any, *args: Any, device: Any = "cuda", **kwargs: Any) -> Any:
        if not is_accelerator(device):
            return original(cls, data, *args, device=device, **kwargs)
        return original(cls, move(data, "cpu"), *args, device="cpu", **kwargs).to("cuda")

    return from_prequantized
