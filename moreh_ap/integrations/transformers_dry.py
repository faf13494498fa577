"""Hugging Face transformers in a dry run: models of folders without weights, and no generation before a first call.

Decides when a folder counts as one without weights. It must not import transformers before the script does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from moreh_ap.errors import OptionError
from moreh_ap.patching import Patches

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
_ON_CALL = ("attn_implementation", "dtype", "torch_dtype", "device_map")


def install(patches: Patches, note: Callable[[str], object], *, without_weights: bool) -> None:
    """Changes transformers, now or when the script imports it; after what the accelerator changes there.

    Args:
        patches: The registry of this process.
        note: Called with what was left out.
        without_weights: Whether modules have no values.
    """
    group = patches.group("A dry run saves nothing, and needs no weights.")

    def save_nothing(modeling: ModuleType) -> None:
        def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> None:
            note("save_pretrained of a model")

        group.replace(modeling.PreTrainedModel, "save_pretrained", save_pretrained, "Saves nothing.")

    def redirect(modeling: ModuleType) -> None:
        cls = modeling.PreTrainedModel
        original = cls.__dict__["from_pretrained"].__func__

        def from_pretrained(wanted: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            if not has_config_alone(name):
                return original(wanted, name, *args, **kwargs)
            return _from_config(wanted, Path(name), kwargs)

        effect = "Makes the model of a folder that has a config.json and no weights, without values."
        group.replace(cls, "from_pretrained", classmethod(from_pretrained), effect)

    def skip(generation: ModuleType) -> None:
        mixin = generation.GenerationMixin
        original = mixin.generate

        def generate(model: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            prompt = kwargs.get("input_ids") if inputs is None else inputs
            if next(model.parameters()).is_cuda or not isinstance(prompt, torch.Tensor):
                return original(model, inputs, *args, **kwargs)
            return prompt

        group.replace(mixin, "generate", generate, "Returns the prompt, where a model on the CPU would continue it.")

    group.when_imported("transformers.modeling_utils", save_nothing)
    if not without_weights:
        return
    group.when_imported("transformers.modeling_utils", redirect)
    group.when_imported("transformers.generation.utils", skip)


def has_config_alone(name: Any) -> bool:
    """Returns whether `name` is a folder with a ``config.json`` and no file of weights.

    Example:
        >>> has_config_alone("no/such/folder")
        False
    """
    folder = Path(name) if isinstance(name, (str, Path)) else Path()
    if not (folder / "config.json").is_file():
        return False
    return not any(True for pattern in _WEIGHTS for _ in folder.glob(pattern))


def _from_config(cls: Any, folder: Path, kwargs: dict[str, Any]) -> Any:
    """Returns the model that a folder's configuration describes.

    Raises:
        OptionError: It would have to be packed, which needs its weights.
    """
    config = kwargs.pop("config", None)
    if not hasattr(config, "to_dict"):
        config = cls.config_class.from_pretrained(folder)
    if kwargs.get("quantization_config") is not None or getattr(config, "quantization_config", None) is not None:
        raise OptionError(
            f"the weights of {folder} are packed when they are loaded, and it has none",
            "a folder with the weights, or a model whose weights are not packed",
            "moreh-ap plan MODEL --devices 8xH100 --lora 16 --frozen nf4",
            "docs/dry-run.md#errors",
        )
    for name, value in kwargs.items():
        if name not in _ON_CALL and hasattr(config, name):
            setattr(config, name, value)
    model = cls(config)
    dtype = kwargs.get("dtype") or kwargs.get("torch_dtype") or "auto"
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    model = model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype).eval()
    return model.cuda() if kwargs.get("device_map") is not None else model
