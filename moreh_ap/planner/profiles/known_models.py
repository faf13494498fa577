"""Public models by name, so that a plan can be asked for without a network.

Decides which models are known and how a name is found among them. Must not know plans or devices.
`known_models.json` has the part of each model's configuration that gives its shape, with its source.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moreh_ap.errors import OptionError
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, from_config

__all__ = ["KnownModel", "find_model", "known_models", "shape_from_file"]


@dataclass(frozen=True)
class KnownModel:
    """A public model.

    Attributes:
        name: Its name here.
        aliases: Other names, its repository among them.
        config: The numbers of its configuration that give its shape.
        source: Where they are from.
        checked: The day on which they were compared with the page at `source`, or "not fetched".
    """

    name: str
    aliases: tuple[str, ...]
    config: Mapping[str, Any]
    source: str
    checked: str

    @property
    def shape(self) -> TransformerShape:
        """The model's shape."""
        return from_config(self.config, self.name)


@lru_cache(maxsize=1)
def known_models() -> tuple[KnownModel, ...]:
    """Returns every model of the list."""
    entries = json.loads(Path(__file__).with_name("known_models.json").read_text(encoding="utf-8"))
    return tuple(KnownModel(**{**entry, "aliases": tuple(entry["aliases"])}) for entry in entries)


def find_model(name: str) -> KnownModel:
    """Returns the model of that name or alias; capitals, spaces and signs do not matter.

    Raises:
        OptionError: There is none; the error names the nearest.

    Example:
        >>> find_model("meta-llama/Llama-2-13b-hf").name
        'Llama2-13B'
    """
    names = {_plain(alias): model for model in known_models() for alias in (model.name, *model.aliases)}
    wanted = _plain(name)
    if wanted in names:
        return names[wanted]
    near = dict.fromkeys(names[one].name for one in difflib.get_close_matches(wanted, names, n=5, cutoff=0.5))
    nearest = list(near) or [model.name for model in known_models()]
    raise OptionError(
        f"model {name!r} is unknown",
        f"a folder with a config.json, that file, or {'the nearest names, ' if near else ''}{', '.join(nearest)}",
        f"moreh-ap plan {nearest[0]}" if near else "moreh-ap plan --config config.json",
    )


def shape_from_file(path: Path) -> TransformerShape:
    """Returns the shape that a configuration file, or the one in a folder, describes.

    Args:
        path: A file, or a folder with a `config.json`.

    Raises:
        OptionError: There is no such file, it is no JSON object, or it does not describe a decoder.
    """
    file = path / "config.json" if path.is_dir() else path
    fix = "moreh-ap plan --config config.json"
    if not file.is_file():
        raise OptionError(f"there is no file {file}", "a folder with a config.json, or that file", fix)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise OptionError(f"{file} is no JSON: {error}", "the config.json of a transformers model", fix) from error
    if not isinstance(config, dict):
        raise OptionError(f"{file} holds a {type(config).__name__}", "an object, as transformers writes it", fix)
    return from_config(config, file.resolve().parent.name)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
