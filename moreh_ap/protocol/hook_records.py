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

[Note: moments]
A hook reads what is on the model while the forward is at its module: an attribute that was set before, a count that
goes on afterwards. When it runs where the script is, the forward is through. So with each attribute the worker says
from which hook on it was there, and what was otherwise when a hook ran, or of buffers when one read them, is answered
too.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.protocol.script_code.written_files import writing_nothing

IN_PLACE = " in place"
FROM = " from hook "
AT = " at hook "


class Report(NamedTuple):
    """The result of a forward with what else it left.

    Attributes:
        result: What the module returned; None if a hook ended the forward.
        seen: ``{number of a hook: what it was given}``, in the order in which hooks ran.
        ended_by: The exception with which a hook ended the forward, in words; None if none did.
        attributes: What was set on parts of the model, ``{path and name: value}``. See [Note: attributes]. A list, dict
            or set that was there before, and has other contents now, has `IN_PLACE` behind its name. Behind that stands
            `FROM` with the position in `seen` of the first hook that found the value, or `AT` with that of the only
            hooks, up to the next value, that found it.
    """

    result: Any
    seen: list[dict[int, tuple[Any, ...]]]
    ended_by: str | None
    attributes: dict[str, Any]


def attributes_in(keys: Iterable[str], *, passing: bool = True) -> tuple[str, ...]:
    """Returns the names of the attributes in a report; without `passing`, of those that the forward ended with."""
    parsed = map(ReportKey.of, keys)
    return tuple(key.name for key in parsed if passing or not key.is_passing)


class ReportKey(NamedTuple):
    """What the key of an attribute in a report says.

    Attributes:
        name: Its path and name.
        in_place: `IN_PLACE`, or nothing.
        position: The position of the first hook that found the value; None if none did.
        is_passing: Whether it was another after the forward.
    """

    name: str
    in_place: str
    position: int | None
    is_passing: bool

    @staticmethod
    def of(key: str) -> ReportKey:
        """Takes a key apart."""
        is_passing = AT in key
        name, _, position = key.partition(AT if is_passing else FROM)
        plain = name.removesuffix(IN_PLACE)
        return ReportKey(plain, name[len(plain) :], int(position) if position else None, is_passing)


class HookMoments(Protocol):
    """Looks at what hooks find."""

    def before_hook(self) -> AbstractContextManager[Any]:
        """Looks at the model before a hook runs; returns what has to be active while it does."""


class HookEnded(Exception):
    """A hook of the script raised: the forward ends, and what hooks saw up to there is answered."""


class Recorder:
    """Where hooks of the forward that runs now leave what they are given; None outside of one (a recomputation)."""

    seen: list[tuple[int, tuple[Any, ...], list[tuple[Tensor, int]]]] | None = None
    moments: HookMoments | None = None


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
        moments = RECORDER.moments
        finding = contextlib.nullcontext() if seen is None or moments is None else moments.before_hook()
        if self.hook is None:
            return None
        try:
            with contextlib.redirect_stdout(io.StringIO()), writing_nothing(), finding:
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
