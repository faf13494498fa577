"""The verifications on this machine, in a readable file, so that a model is verified once.

Decides which models and plans count as the same, and what is saved. Must not know how a plan is verified. The file may
be deleted at any time; a damaged file is replaced.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from types import FunctionType

import torch
from torch import nn

from moreh_ap.local.cache_files import CacheFile
from moreh_ap.plan import Plan
from moreh_ap.protocol.script_code.replaced_forwards import own_forwards
from moreh_ap.session.verification.equivalence import Equivalence
from moreh_ap.version import __version__

FILE = CacheFile("verified.json")
_NUMBERS = ("loss", "norm", "gradient", "weight")


def look_up(key: str) -> Equivalence | None:
    """Returns the result for this key, None if it was not verified."""
    entry = FILE.look_up(key) or {}
    known = {name: value for name, value in entry.items() if name in Equivalence.__dataclass_fields__}
    return Equivalence(**known) if {"plan", "verdict"} <= known.keys() else None


def keep(key: str, model: str, found: Equivalence) -> None:
    """Writes a result.

    Raises:
        OSError: The file cannot be written.
    """
    numbers = {name: float(f"{getattr(found, name):.2e}") for name in _NUMBERS}
    date = datetime.now(timezone.utc).date().isoformat()
    FILE.keep(key, {"model": model, **asdict(found), **numbers, "date": date, **_versions()})


def key_of(root: nn.Module, path: str, arguments: str, plan: Plan) -> str:
    """Returns the key of a model, a kind of call and a plan.

    It changes with the code of a module's class and of a forward of its own, the shape of a parameter, the plan, the
    versions of PyTorch and transformers, and the code of this package.

    Args:
        path: The submodule that is called.
        arguments: The call's arguments as text: names, numbers of dims, dtypes.
    """
    key_fields = [path, arguments, str(plan), json.dumps(_versions()), _own_code()]
    for cls in sorted(
        {type(submodule) for submodule in root.modules()}, key=lambda cls: f"{cls.__module__}.{cls.__qualname__}"
    ):
        key_fields += [cls.__module__, cls.__qualname__, _source(cls)]
    for function in own_forwards(root):
        key_fields.append(_code(function) if inspect.isfunction(function) else type(function).__qualname__)
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        key_fields.append(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}")
    return hashlib.sha256("\n".join(key_fields).encode()).hexdigest()[:32]


def _source(cls: type) -> str:
    """Returns the source of the class, or its functions' byte code without a source (a notebook, a shell)."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return "".join(_code(value) for value in vars(cls).values() if inspect.isfunction(value))


def _code(function: FunctionType) -> str:
    return f"{function.__name__} {function.__code__.co_code.hex()} {function.__code__.co_names}"


def _versions() -> dict[str, str]:
    transformers = sys.modules.get("transformers")
    return {
        "moreh_ap": __version__,
        "torch": torch.__version__,
        "transformers": getattr(transformers, "__version__", ""),
    }


@cache
def _own_code() -> str:
    """Returns a digest of the code that runs plans: after a change of it no earlier result is valid."""
    folder = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for room in ("parallelizer", "runtime", "session"):
        for source in sorted((folder / room).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()
