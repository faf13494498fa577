"""What a forward leaves behind beside its result: what hooks of the script were given, and attributes that it set.

Decides how that is noticed in a worker, so that it can be answered with the result. Must not know who asks for it.

[Note: hooks run twice]
A hook of the script runs in every worker, on its rows: what it returns counts there, and what it keeps may be read by
the model's own code. Whatever it keeps for the script would be lost. So the worker answers what the hook was given, as
further leaves of the result, and the hook runs once more where the script is, on whole tensors; what it prints in a
worker is dropped, and what it returns there.

[Note: attributes]
What a forward sets on parts of the model (``self.last_loss = loss``) is answered in the same way, if it is made of
tensors and plain values: the script finds it on its own module, and may go backward from it. In a worker it stays as it
is. What was set to something else, or what the proof of splitting did not see, is left out, and the script is told.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.errors import UnsupportedError
from moreh_ap.protocol.module_attributes import is_same_container, num_leaves, reported_attributes

_ATTRIBUTE = "_moreh_has_reported_hooks"


class Report(NamedTuple):
    """The result of a forward with what else it left.

    Attributes:
        result: What the module returned; None if a hook ended the forward.
        seen: ``{number of a hook: what it was given}``, in the order in which hooks ran.
        ended_by: The exception with which a hook ended the forward, in words; None if none did.
        attributes: What was set on parts of the model, ``{path and name: value}``. See [Note: attributes].
    """

    result: Any
    seen: list[dict[int, tuple[Any, ...]]]
    ended_by: str | None
    attributes: dict[str, Any]


class Run(NamedTuple):
    """A forward that has run.

    Attributes:
        result: What it returned; a `Report` if it left more than that.
        left_out: Names of attributes that it set, and that are not in the report.
        gathered: Names of lists, dicts and sets to which it added.
    """

    result: Any
    left_out: list[str]
    gathered: list[str]


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


def with_report(
    module: nn.Module, run: Callable[[], Any], known: Mapping[str, tuple[str, ...]] | None = None
) -> Run:
    """Runs a forward of `module` and looks what it leaves.

    Args:
        module: The model.
        run: The forward.
        known: The attributes that may be answered, and the kinds of their leaves; None for all.

    Raises:
        UnsupportedError: A tensor that a hook was given was changed in place afterwards.
    """
    attributes = reported_attributes(module)
    before = {} if attributes is None else attributes.marks()
    result, seen, ended_by = _with_hooks(module, run)
    found: dict[str, Any] = {}
    left_out: list[str] = []
    changed = {} if attributes is None else attributes.changed(before)
    for name, value in changed.items():
        number = num_leaves(value)
        if number is not None and (known is None or number == len(known.get(name, ()))):
            found[name] = value
        else:
            left_out.append(name)
    reports = bool(found) or _has_reported_hooks(module)
    gathered = [name for name, value in changed.items() if is_same_container(value, before.get(name))]
    return Run(Report(result, seen, ended_by, found) if reports else result, left_out, gathered)


def _with_hooks(module: nn.Module, run: Callable[[], Any]) -> tuple[Any, list[dict[int, tuple[Any, ...]]], str | None]:
    """The result of `run`, what hooks of the script on the module were given, and what ended the forward early."""
    if not _has_reported_hooks(module):
        return run(), [], None
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
    return result, [{number: given} for number, given, _ in seen], ended_by


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
