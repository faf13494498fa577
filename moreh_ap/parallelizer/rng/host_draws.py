"""Numbers that a forward draws from Python's or NumPy's stream for one row after the other.

Decides which calls are for rows, and makes those of other workers' rows. Must not know models, or where streams start.

[Note: row after row]
SpecAugment draws which steps of a row are masked, for each row in turn. A worker makes the calls for the rows before
its own first, and those for the rows behind its own afterwards. So its rows get the numbers of one device, and all
workers leave the stream where one device leaves it. Two forwards, one of twice as many rows as the other, show which
calls those are: those that the other makes twice as often at the same line. Calls for the rows of others have the
arguments of this worker's rows, which are part of the mark by which workers notice that they went apart.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from moreh_ap.parallelizer.data.call_sites import site_of_call
from moreh_ap.parallelizer.rng.shared_draws import Share
from moreh_ap.patching import Patches
from moreh_ap.protocol.rng_state import state_of_host

_MODULES = {"random": "random", "numpy.random": "rand"}
"""Modules whose functions draw from one common stream, and a function of each that does."""
_NO_DRAWS = {"seed", "getstate", "setstate", "get_state", "set_state"}


class HostDraw(NamedTuple):
    """A call that draws: its line, the function as "numpy.random.choice", and its arguments, pickled."""

    site: int
    function: str
    arguments: bytes


@dataclass(frozen=True)
class RowDraws:
    """The calls that a forward makes for each row in turn, at one place: for one row, in order."""

    calls: tuple[HostDraw, ...]

    @property
    def place(self) -> int:
        """The line of the first call."""
        return self.calls[0].site


OnDraw = Callable[[Callable[[], Any], HostDraw], Any]
"""Gets the original function with its arguments, and what the call is; returns its result."""


class HostDrawRecorder:
    """While active, notes what is drawn from the host's streams by the functions of their modules.

    Attributes:
        drawn: In order.
    """

    def __init__(self) -> None:
        self.drawn: list[HostDraw] = []

    def __enter__(self) -> HostDrawRecorder:
        self._seeing = _seeing_draws(self._note)
        self._seeing.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._seeing.__exit__(*raised)

    def _note(self, original: Callable[[], Any], draw: HostDraw) -> Any:
        self.drawn.append(draw)
        return original()


def row_draws_of(fewer: Sequence[HostDraw], more: Sequence[HostDraw], rows: int = 1) -> tuple[RowDraws, ...]:
    """Returns what a forward draws for each row in turn; () where that is nothing, or cannot be told.

    Args:
        fewer: What a forward of `rows` rows drew.
        more: What the same forward of twice as many rows drew, from the same streams.
        rows: How many the former were.
    """
    times = Counter(draw.site for draw in fewer), Counter(draw.site for draw in more)
    of_rows = {site for site, number in times[0].items() if times[1][site] == 2 * number}
    if any(times[1][site] != times[0][site] for site in {*times[0], *times[1]} - of_rows):
        return ()
    found: list[RowDraws] = []
    rest = list(more)
    for is_of_rows, group in itertools.groupby(fewer, key=lambda draw: draw.site in of_rows):
        calls = list(group)
        if not is_of_rows:
            rest = rest[len(calls) :]
            continue
        blocks = []
        while calls:
            size = next((k for k in range(1, len(calls) + 1) if _repeats(calls[:k], calls, rest, rows)), None)
            if size is None:
                return ()  # rows have arguments of their own
            blocks.append(RowDraws(tuple(calls[:size])))
            calls, rest = calls[size * rows :], rest[2 * size * rows :]
        if len({block.place for block in blocks}) < len(blocks):
            return ()  # twice for the first row and then for the second, or once for each of both and then again
        found += blocks
    return tuple(found)


def _repeats(block: list[HostDraw], fewer: list[HostDraw], more: list[HostDraw], rows: int) -> bool:
    """Says whether calls begin with those of a block for each of so many rows, and twice as many."""
    size = len(block) * rows
    return fewer[:size] == block * rows and more[: 2 * size] == block * (2 * rows)


class SharedHostDraws:
    """While active in a forward, what is drawn for each row in turn is what one device draws for this worker's rows.

    Args:
        blocks: What such a forward draws for rows, as `row_draws_of` tells it.
        share: The rows that are computed here.
    """

    mark = 0
    """Tells apart forwards of the workers in this process that drew for rows with other arguments; of the last one."""

    def __init__(self, blocks: Sequence[RowDraws], share: Share) -> None:
        self._blocks = {block.place: block.calls for block in blocks}
        self._share = share

    def __enter__(self) -> SharedHostDraws:
        SharedHostDraws.mark = 0
        self._again: dict[int, tuple[HostDraw, ...]] = {}
        """What was drawn for rows, by where the streams were before the first call."""
        self._forward = self._active(self._by_line)
        self._forward.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._forward.__exit__(*raised)

    def again(self) -> AbstractContextManager[None]:
        """Returns what has to be active in the backward, where checkpointed blocks draw what they drew."""
        return self._active(lambda draw: self._again.get(_hash_of_streams()))

    @contextmanager
    def _active(self, find: Callable[[HostDraw], tuple[HostDraw, ...] | None]) -> Iterator[None]:
        """Inside, calls for rows are those of one device; `find` tells which call is the first of its row."""
        self._block: tuple[HostDraw, ...] = ()
        self._position = 0
        with _seeing_draws(functools.partial(self._draw, find)):
            yield
        if self._block:
            self._go_apart()

    def _by_line(self, draw: HostDraw) -> tuple[HostDraw, ...] | None:
        known = self._blocks.get(draw.site)
        if known is None:
            return None
        # One call a row: its arguments may be others than in the trial, as long as all rows have them.
        block = self._again[_hash_of_streams()] = (draw,) if len(known) == 1 else known
        SharedHostDraws.mark = zlib.crc32(repr(block).encode(), SharedHostDraws.mark)
        return block

    def _draw(
        self, find: Callable[[HostDraw], tuple[HostDraw, ...] | None], original: Callable[[], Any], draw: HostDraw
    ) -> Any:
        if not self._block:
            self._block, self._position = find(draw) or (), 0
            if not self._block:
                return original()
            self._make(self._share.start)
        if draw[1:] != self._block[self._position % len(self._block)][1:]:
            self._go_apart()
            return original()
        result = original()
        self._position += 1
        if self._position == len(self._block) * (self._share.stop - self._share.start):
            self._make(self._share.total - self._share.stop)
            self._block = ()
        return result

    def _make(self, rows: int) -> None:
        """Makes the calls for some rows of other workers."""
        for draw in self._block * rows:
            module, _, name = draw.function.rpartition(".")
            args, kwargs = pickle.loads(draw.arguments)
            stream = getattr(sys.modules[module], _MODULES[module]).__wrapped__.__self__
            getattr(stream, name)(*args, **kwargs)

    def _go_apart(self) -> None:
        """Has the workers notice that calls cannot be told apart here; this worker's share makes its mark its own."""
        self._block, self._blocks, self._again = (), {}, {}
        SharedHostDraws.mark = zlib.crc32(repr(("apart", self._share)).encode())


def _hash_of_streams() -> int:
    return hash(state_of_host())


@contextmanager
def _seeing_draws(on_draw: OnDraw) -> Iterator[None]:
    """Inside, every call of a function that draws from one of the host's streams goes through `on_draw`."""
    patches = Patches()
    group = patches.group("A forward draws from the streams of Python and NumPy for one row after the other.")

    def replace(module: Any, name: str) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = pickle.dumps((args, kwargs))
            except (pickle.PicklingError, TypeError, AttributeError):
                return original(*args, **kwargs)
            call = HostDraw(site_of_call(), f"{module.__name__}.{name}", arguments)
            return on_draw(functools.partial(original, *args, **kwargs), call)

        group.replace(module, name, draw, "Draws for the rows of other workers too, where it draws for each row.")

    for module_name, drawing in _MODULES.items():
        module = sys.modules.get(module_name)
        if module is not None:
            stream = getattr(module, drawing).__self__
            own = [name for name, value in vars(module).items() if getattr(value, "__self__", None) is stream]
            for name in own:
                if name not in _NO_DRAWS:
                    replace(module, name)
    try:
        yield
    finally:
        patches.undo()
