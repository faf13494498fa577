"""What a forward leaves behind beside its result: what hooks of the script were given, and attributes that it set.

Decides how that is noticed in a worker, so that it can be answered with the result. Must not know who asks for it.

[Note: hooks run twice]
A hook of the script runs in every worker, on its rows: what it returns counts there, and what it keeps may be read by
the model's own code. Whatever it keeps for the script would be lost. So the worker answers what the hook was given, as
further leaves of the result, and the hook runs once more where the script is, on whole tensors; what it prints or
writes in a worker is dropped, and what it returns where the script is.

[Note: attributes]
What a forward sets on parts of the model (``self.last_loss = loss``) is answered in the same way, if it is made of
tensors and plain values: the script finds it on its own module, and may go backward from it. In a worker it stays as it
is. What was set to something else, or what the split check did not see, is left out, and the script is told.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.protocol.script_code.written_files import writing_nothing

IN_PLACE = " in place"


class Report(NamedTuple):
    """The result of a forward with what else it left.

    Attributes:
        result: What the module returned; None if a hook ended the forward.
        seen: ``{number of a hook: what it was given}``, in the order in which hooks ran.
        ended_by: The exception with which a hook ended the forward, in words; None if none did.
        attributes: What was set on parts of the model, ``{path and name: value}``. See [Note: attributes]. A list, dict
            or set that was there before, and has other contents now, has `IN_PLACE` behind its name.
    """

    result: Any
    seen: list[dict[int, tuple[Any, ...]]]
    ended_by: str | None
    attributes: dict[str, Any]


def attributes_in(keys: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of the attributes in a report."""
    return tuple(key.removesuffix(IN_PLACE) for key in keys)


class HookEnded(Exception):
    """A hook of the script raised: the forward ends, and what hooks saw up to there is answered."""


class Recorder:
    """Where hooks of the forward that runs now leave what they are given; None outside of one (a recomputation)."""

    seen: list[tuple[int, tuple[Any, ...], list[tuple[Tensor, int]]]] | None = None


RECORDER = Recorder()


class ReportedHook:
    """Stands for a forward hook, or forward pre-hook, of the script in a worker. See [Note: hooks run twice].

    Args:
        number: The hook's number where the script is.
        hook: What to run here; None where it could not be sent.
    """

    def __init__(self, number: int, hook: Callable[..., Any] | None) -> None:
        self._number, self.hook = number, hook

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        seen = RECORDER.seen
        if seen is not None:
            seen.append((self._number, given, [(tensor, tensor._version) for tensor in _tensors(given)]))
        if self.hook is None:
            return None
        try:
            with contextlib.redirect_stdout(io.StringIO()), writing_nothing():
                return self.hook(module, *given)
        except Exception as error:
            if seen is None:
                raise
            raise HookEnded(f"{type(error).__name__}: {error}") from error


class QuietHook:
    """Stands for a backward hook of the script in a worker: it prints, and writes files, where the script is.

    Args:
        hook: What to run here; None where it could not be sent.
    """

    def __init__(self, hook: Callable[..., Any] | None) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        if self.hook is None:
            return None
        with contextlib.redirect_stdout(io.StringIO()), writing_nothing():
            return self.hook(module, *given)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
