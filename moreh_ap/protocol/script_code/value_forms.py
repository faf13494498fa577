"""Fingerprints of the script's values, which show whether a value has changed between two calls without keeping it.

Decides how closely a value is looked at: plain values, and small containers of them, are their own form; tensors are
compared by identity and version, modules by those of their tensors; functions and classes by identity; everything else
by what pickle makes of it. Must not know whose values they are.
"""

from __future__ import annotations

import argparse
import copyreg
import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import pickle
import sys
import sysconfig
import types
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from moreh_ap.protocol.pytree import is_container

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MAX_LENGTH, _MAX_DEPTH = 64, 4
_FIXED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    nn.Module,
    logging.Logger,
    torch.jit.ScriptFunction,
)


class Same:
    """Is equal as long as the object is the same one; keeps none alive that can be referred to weakly."""

    __slots__ = ("_object",)

    def __init__(self, value: Any) -> None:
        try:
            self._object: Any = weakref.ref(value)  # an object has one such reference, as long as one is held
        except TypeError:
            self._object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._object is self._object

    def __hash__(self) -> int:
        return id(self._object)


class PickledForm(NamedTuple):
    """The pickle of a value.

    Attributes:
        kind: Its class.
        digest: Of the pickle.
        objects: What is in it and compared by identity: tensors, functions, what cannot be pickled.
        num_bytes: The size of the pickle.
        is_whole: Whether all of it can be pickled.
        has_tensors: Whether there are tensors among `objects`.
    """

    kind: type
    digest: bytes
    objects: tuple[Hashable, ...]
    num_bytes: int
    is_whole: bool
    has_tensors: bool


def form_of(value: Any) -> Hashable:
    """Returns what is equal as long as `value` is."""
    form = _plain_form(value)
    if form is not None:
        return form
    if isinstance(value, nn.Module):
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [*value.parameters(), *value.buffers()]
        return Same(value), tuple([(Same(tensor), _version_of(tensor)) for tensor in tensors])
    if isinstance(value, _FIXED) or type(value) is object:
        return Same(value)
    pickled = _pickled_form(value)
    # An object whose pickle is never the same twice (it has the time in it) is compared by identity.
    return Same(value) if pickled is None else pickled


def is_stable(value: Any, form: Hashable) -> bool:
    """Returns whether the form of a value that has not changed is what it was."""
    return not isinstance(form, PickledForm) or _pickled_form(value) == form


def is_alike(value: Any, other: Any) -> bool:
    """Returns whether two objects that a library has made have the same pickle, in which there is no tensor."""
    if not isinstance(value, type(other)) or isinstance(value, (*_PLAIN, torch.Tensor)):
        return False
    forms = form_of(value), form_of(other)
    digests = [form.digest for form in forms if isinstance(form, PickledForm) and not form.has_tensors]
    return len(digests) == 2 and digests[0] == digests[1]


def tensors_in(value: Any, depth: int = _MAX_DEPTH) -> list[torch.Tensor]:
    """Returns the tensors in a value that is one, or a small container of some."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    if depth == 0 or not is_container(value, (list, tuple, dict)) or len(value) > _MAX_LENGTH:
        return []
    return [tensor for part in parts for tensor in tensors_in(part, depth - 1)]


def _plain_form(value: Any, depth: int = _MAX_DEPTH) -> Hashable | None:
    """Returns the form of a plain value, a tensor, or a small container of such; None for everything else."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return Same(value), _version_of(value)
    if depth == 0:
        return None
    if is_container(value, (list, tuple, set, frozenset, dict)):
        parts = list(value.items()) if isinstance(value, dict) else value
    elif is_record(value):
        parts = list(vars(value).items())
    else:
        return None
    if len(parts) > _MAX_LENGTH:
        return None
    forms = [_plain_form(part, depth - 1) for part in parts]
    if any(form is None for form in forms):
        return None
    return type(value), frozenset(forms) if isinstance(value, (set, frozenset)) else tuple(forms)


def _version_of(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # to look whether it changed is not to read it
        return 0 if tensor.is_inference() else tensor._version


def is_record(value: Any) -> bool:
    """Returns whether `value` is an object with nothing but attributes: settings, a counter of the script."""
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return True
    kind = type(value)
    if isinstance(value, (type, nn.Module, torch.Tensor)) or not hasattr(value, "__dict__"):
        return False
    return dataclasses.is_dataclass(value) or (is_of_script(kind.__module__) and kind.__bases__ == (object,))


@functools.lru_cache(maxsize=4096)
def is_of_script(name: str) -> bool:
    """Returns whether a Python module is the script's own: not of an installed library, Python or this package."""
    if name in ("__main__", "__mp_main__"):
        return True
    file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
    if file is None or name.partition(".")[0] in ("moreh_ap", "moreh"):
        return False
    path = Path(file)
    if any(path.is_relative_to(folder) for folder in _installed()) or "site-packages" in path.parts:
        return False
    top = path.parent if path.name == "__init__.py" else path
    return top.name not in _installed_into(top.parent)


@functools.cache
def _installed() -> list[Path]:
    """Returns the folders of Python's own modules and of installed libraries."""
    return [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]


@functools.cache
def _installed_into(folder: Path) -> frozenset[str]:
    """Returns the packages and modules that an installer has put into a folder, as `pip install --target` does."""
    records = [one.read_text("RECORD") or "" for one in importlib.metadata.distributions(path=[str(folder)])]
    lines = (line for record in records for line in record.splitlines())
    return frozenset(line.partition(",")[0].partition("/")[0] for line in lines)


# -- what pickle makes of a value --------------------------------------------------------------------------------------


class _Digest:
    """A file of which only a digest is kept."""

    def __init__(self) -> None:
        self.hash, self.num_bytes = hashlib.blake2b(digest_size=16), 0

    def write(self, data: Any) -> int:
        self.hash.update(data)
        num_bytes = memoryview(data).nbytes
        self.num_bytes += num_bytes
        return num_bytes


class _FormPickler(pickle.Pickler):
    """Pickles a value, with numbers in the places of what is compared by identity."""

    def __init__(self, file: _Digest) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.objects: list[Hashable] = []
        self.is_whole, self.has_tensors = True, False

    def reducer_override(self, obj: Any) -> Any:
        if obj is _numbered:
            return NotImplemented
        if isinstance(obj, torch.Tensor):
            self.has_tensors = True
            return self._by_identity((Same(obj), _version_of(obj)))
        if isinstance(obj, _FIXED):
            return self._by_identity(Same(obj))
        reduce = copyreg.dispatch_table.get(type(obj))
        try:
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduce is None else reduce(obj)
        except Exception:  # of any class: objects raise errors of their own when they cannot be pickled
            self.is_whole = False
            return self._by_identity(Same(obj))

    def _by_identity(self, one: Hashable) -> Any:
        self.objects.append(one)
        return _numbered, (len(self.objects),)


def _numbered(number: int) -> int:
    return number


def _pickled_form(value: Any) -> PickledForm | None:
    file = _Digest()
    pickler = _FormPickler(file)
    try:
        pickler.dump(value)
    except Exception:  # of any class, as above; a list that contains itself through an object is too deep
        return None
    objects = tuple(pickler.objects)
    return PickledForm(type(value), file.hash.digest(), objects, file.num_bytes, pickler.is_whole, pickler.has_tensors)
