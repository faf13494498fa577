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
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn

from moreh_ap.local.cache_files import CacheFile
from moreh_ap.plan import Plan
from moreh_ap.protocol.module_attributes import own_attributes
from moreh_ap.protocol.script_code.replaced_forwards import own_forwards
from moreh_ap.protocol.script_code.script_globals import functions_of, read_by
from moreh_ap.session.verification.equivalence import Equivalence
from moreh_ap.version import __version__

FILE = CacheFile("verified.json")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_WITHOUT_TEXT = (type, ModuleType, FunctionType, nn.Module, torch.Tensor)
_MAX_PARTS = 256
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

    It changes with the code of a module's class and of functions of the script that its forward calls, attributes and
    global variables of plain values, the shape of a parameter, the plan, the versions of PyTorch and transformers, and
    the code of this package.

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
    for function in functions_of(root):
        key_fields.append(_code(function))
    for variable in read_by(root):
        key_fields.append(f"{variable.path} {variable.name} {_text_of(variable.value())}")
    for path_of_module, submodule in root.named_modules():
        for name, value in sorted(own_attributes(submodule).items()):
            key_fields.append(f"{path_of_module} {name} {_text_of(value)}")
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
    return f"{function.__name__} {_code_in(function.__code__)}"


def _code_in(code: CodeType) -> str:
    """Returns byte code with its names and constants, and that of functions inside."""
    constants = [_code_in(one) if isinstance(one, CodeType) else _text_of(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _text_of(value: Any, depth: int = 3) -> str:
    """Returns the same text in every process for equal values: of objects their attributes, of what says nothing by
    itself (a tensor, a module, a long list) the type."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, _PLAIN):
        return f"{kind} {value!r}"
    if depth == 0 or isinstance(value, _WITHOUT_TEXT):
        return kind
    parts = value if isinstance(value, (list, tuple, set, frozenset, dict)) else getattr(value, "__dict__", ())
    if len(parts) > _MAX_PARTS:
        return f"{kind} {len(parts)}"
    if isinstance(parts, (dict, MappingProxyType)):
        texts = sorted(f"{_text_of(key, depth - 1)}: {_text_of(part, depth - 1)}" for key, part in parts.items())
    else:
        texts = [_text_of(part, depth - 1) for part in parts]
    return f"{kind} {sorted(texts) if isinstance(parts, (set, frozenset)) else texts}"


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
