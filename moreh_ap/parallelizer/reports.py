"""What a forward leaves behind beside its result: what hooks of the script were given, and attributes that it set.

Decides how that is noticed in a worker, so that it can be answered with the result. Must not know who asks for it.

[Note: hooks run twice]
A hook of the script runs in every worker, on its rows: what it returns counts there, and what it keeps may be read by
the model's own code. Whatever it keeps for the script would be lost. So the worker answers what the hook was given, as
further leaves of the result, and the hook runs once more where the script is, on whole tensors; what it prints in a
worker is dropped, and what it returns there.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.errors import UnsupportedError

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "diffusers", "moreh_ap")
"""Packages whose hooks and modules do their work inside the model: nothing of theirs is reported."""

_ATTRIBUTE = "_moreh_has_reported_hooks"


class Report(NamedTuple):
    """The result of a forward with what else it left.

    Attributes:
        result: What the module returned; None if a hook ended the forward.
        seen: ``{number of a hook: what it was given}``, in the order in which hooks ran.
        ended_by: The exception with which a hook ended the forward, in words; None if none did.
    """

    result: Any
    seen: list[dict[int, tuple[Any, ...]]]
    ended_by: str | None


class HookEnded(Exception):
    """A hook of the script raised: the forward ends, and what hooks saw up to there is answered."""


class _Recorder:
    """Where hooks of the forward that runs now leave what they are given; None outside of one (a recomputation)."""

    seen: list[tuple[int, tuple[Any, ...], list[tuple[Tensor, int]]]] | None = None


_RECORDER = _Recorder()


class ReportedHook:
    """Stands for a forward hook, or forward pre-hook, of the script in a worker. See [Note: hooks run twice].

    Args:
        number: The hook's number where the script is.
        hook: What to run here; None where it could not be sent.
    """

    def __init__(self, number: int, hook: Callable[..., Any] | None) -> None:
        self._number, self._hook = number, hook

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        seen = _RECORDER.seen
        if seen is not None:
            seen.append((self._number, given, [(tensor, tensor._version) for tensor in _tensors(given)]))
        if self._hook is None:
            return None
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return self._hook(module, *given)
        except Exception as error:
            if seen is None:
                raise
            raise HookEnded(f"{type(error).__name__}: {error}") from error


class QuietHook:
    """Stands for a backward hook of the script in a worker: it prints where the script is.

    Args:
        hook: What to run here; None where it could not be sent.
    """

    def __init__(self, hook: Callable[..., Any] | None) -> None:
        self._hook = hook

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        if self._hook is None:
            return None
        with contextlib.redirect_stdout(io.StringIO()):
            return self._hook(module, *given)


def with_report(module: nn.Module, run: Callable[[], Any]) -> Any:
    """Returns the result of `run`, a forward of `module`; a `Report` if hooks of the script are on it.

    Raises:
        UnsupportedError: A tensor that a hook was given was changed in place afterwards.
    """
    if not _has_reported_hooks(module):
        return run()
    seen: list[tuple[int, tuple[Any, ...], list[tuple[Tensor, int]]]] = []
    _RECORDER.seen = seen
    ended_by, result = None, None
    try:
        result = run()
    except HookEnded as ended:
        ended_by = str(ended)
    finally:
        _RECORDER.seen = None
    for _, _, tensors in seen:
        for tensor, version in tensors:
            if tensor._version != version:
                raise _changed_in_place(tensor)
    return Report(result, [{number: given} for number, given, _ in seen], ended_by)


def _has_reported_hooks(module: nn.Module) -> bool:
    """Looked up once: workers get a module with its hooks on it, and another one when hooks come or go."""
    found: bool | None = module.__dict__.get(_ATTRIBUTE)
    if found is None:
        found = any(
            isinstance(hook, ReportedHook)
            for part in module.modules()
            for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        )
        module.__dict__[_ATTRIBUTE] = found
    return found


def _changed_in_place(tensor: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"A hook was given a tensor of shape {tuple(tensor.shape)} that is changed in place afterwards.",
        allowed="Hooks on modules whose inputs and outputs stay as they are: nn.ReLU(inplace=False), x = x + y.",
        fix="module.inplace = False  # of the nn.ReLU behind the hooked module",
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# -- attributes --------------------------------------------------------------------------------------------------------


def attributes_of(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Returns what tells whether attributes change, ``{(path, name): value}``, of parts whose class is the user's."""
    return {
        (path, name): (value, len(value) if isinstance(value, (list, dict, set)) else None)
        for path, part in module.named_modules()
        if _is_of_user(type(part))
        for name, value in vars(part).items()
        if not name.startswith("_") and name != "training"
    }


def changed_attributes(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> tuple[str, ...]:
    """Returns the names of attributes that a forward set, such as ``encoder.attention``."""
    changed = (
        key for key, (value, length) in after.items() if key not in before or not _same(before[key], value, length)
    )
    return tuple(f"{path}.{name}".lstrip(".") for path, name in changed)


def _same(before: tuple[Any, int | None], value: Any, length: int | None) -> bool:
    return before[0] is value and before[1] == length


def _is_of_user(cls: type) -> bool:
    """Whether the class, or one that it is derived from (FSDP2 derives another), is none of a library."""
    return any(base.__module__.split(".")[0] not in (*LIBRARIES, "builtins", "typing") for base in cls.__mro__)
