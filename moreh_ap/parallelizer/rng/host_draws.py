"""Numbers that a forward draws from Python's or NumPy's stream for one row after the other.

Decides which calls are for rows, and makes those of other workers' rows. Must not know models, or where streams start.

[Note: row after row]
SpecAugment draws which steps of a row are masked, for each row in turn. Two forwards, one of twice as many rows as the
other, show which calls those are: those that the other makes twice as often at the same line. What a row draws may
depend on it (a row of fewer steps draws among fewer), so workers draw in turn, as rows do on one device: each goes on
from where the worker before it has left the streams, and all from where the last one leaves them (`turns.py`).

Micro-batches cannot wait for those of other workers. There a worker makes the calls for the rows before its own first,
and those for the rows behind its own afterwards, with the arguments of its own rows. These are part of the mark by
which workers notice that they went apart.
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

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from moreh_ap.parallelizer.observation.call_sites import site_of_call
from moreh_ap.parallelizer.rng.shared_draws import Share
from moreh_ap.parallelizer.rng.turns import KnownTurns, NotedTurns, Turns
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
    """The calls that a forward makes for each row in turn, at one place: for one row, in order.

    Attributes:
        calls: Without their arguments if workers take turns.
        in_turn: Whether they do.
    """

    calls: tuple[HostDraw, ...]
    in_turn: bool = False

    @property
    def place(self) -> int:
        """The line of the first call."""
        return self.calls[0].site


_Find = Callable[[HostDraw], tuple[RowDraws | None, Turns | None]]
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


def row_draws_of(
    fewer: Sequence[HostDraw], more: Sequence[HostDraw], rows: int = 1, *, in_turn: bool = False
) -> tuple[RowDraws, ...]:
    """Returns what a forward draws for each row in turn; () where that is nothing, or cannot be told.

    Args:
        fewer: What a forward of `rows` rows drew.
        more: What the same forward of twice as many rows drew, from the same streams.
        rows: How many the former were.
        in_turn: Whether workers take turns, so that rows may have arguments of their own.
    """
    if in_turn:
        fewer, more = ([HostDraw(draw.site, draw.function, b"") for draw in draws] for draws in (fewer, more))
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
            blocks.append(RowDraws(tuple(calls[:size]), in_turn))
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
        blocks: What such a forward draws for rows, as `row_draws_of` returns it.
        share: The rows that are computed here.
        turns: The workers' turns; needed where blocks are drawn in turn.

    Attributes:
        gathering: Modules of this class have workers wait for each other, where there are any: no turn goes on in them.
    """

    mark = 0
    """Tells apart forwards of the workers in this process that drew for rows with other arguments; of the last one."""

    def __init__(self, blocks: Sequence[RowDraws], share: Share, turns: Turns | None = None) -> None:
        self._blocks = {block.place: block for block in blocks}
        self._share, self.turns = share, turns
        self.gathering: type[Any] | None = None
        self._turn: Turns | None = None
        self._guard: RemovableHandle | None = None

    def __enter__(self) -> SharedHostDraws:
        SharedHostDraws.mark = 0
        self._again: dict[int, tuple[RowDraws, KnownTurns]] = {}
        """What was drawn for rows, by where the streams were before the first call; and the turn of it."""
        self._forward = self._active(self._by_line)
        self._forward.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        try:
            self.end_early()
        finally:
            self._forward.__exit__(*raised)

    def again(self) -> AbstractContextManager[None]:
        """Returns what has to be active in the backward, where checkpointed blocks draw what they drew."""
        return self._active(lambda draw: self._again.get(_hash_of_streams(), (None, None)))

    @contextmanager
    def _active(self, find: _Find) -> Iterator[None]:
        """Inside, calls for rows are those of one device; `find` returns which call is the first of its row."""
        self._block: tuple[HostDraw, ...] = ()
        self._position = 0
        with _seeing_draws(functools.partial(self._draw, find)):
            yield
        if self._block:
            self._go_apart()

    def _by_line(self, draw: HostDraw) -> tuple[RowDraws | None, Turns | None]:
        known = self._blocks.get(draw.site)
        if known is None:
            return None, None
        replayed = KnownTurns()
        if known.in_turn:
            assert self.turns is not None  # the caller takes them
            block, turn = known, NotedTurns(self.turns, replayed)
        else:  # one call a row: its arguments may be others than in the trial, as long as all rows have them
            block, turn = RowDraws((draw,)) if len(known.calls) == 1 else known, None
        self._again[_hash_of_streams()] = block, replayed
        SharedHostDraws.mark = zlib.crc32(repr(block).encode(), SharedHostDraws.mark)
        return block, turn

    def _draw(self, find: _Find, original: Callable[[], Any], draw: HostDraw) -> Any:
        if not self._block:
            block, turn = find(draw)
            if block is None:
                return original()
            if block.in_turn:
                assert turn is not None
                if not turn.begin(draw.site, self._share):
                    self._go_apart()
                    return original()
                self._turn = turn
                if self.gathering is not None:
                    self._guard = register_module_forward_pre_hook(self._before_module)
            self._block, self._position = block.calls, 0
            self._make(self._share.start)
        expected = self._block[self._position % len(self._block)]
        if draw.function != expected.function or (self._turn is None and draw.arguments != expected.arguments):
            self._go_apart()
            return original()
        result = original()
        self._position += 1
        row, is_through = divmod(self._position, len(self._block))
        if self._turn is not None and not is_through:
            self._turn.after(self._share.start + row)
        if self._position == len(self._block) * (self._share.stop - self._share.start):
            self._make(self._share.total - self._share.stop)
            self._end_turn()
            self._block = ()
        return result

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.end(self._share)
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if self.gathering is not None and isinstance(module, self.gathering):
            self.end_early()

    def end_early(self) -> None:
        """Ends a turn in which fewer rows have drawn than should, so that no worker waits for it."""
        if self._turn is not None:
            self._go_apart()

    def _make(self, rows: int) -> None:
        """Makes the calls for some rows of other workers, unless these do."""
        for draw in () if self._turn is not None else self._block * rows:
            module, _, name = draw.function.rpartition(".")
            args, kwargs = pickle.loads(draw.arguments)
            stream = getattr(sys.modules[module], _MODULES[module]).__wrapped__.__self__
            getattr(stream, name)(*args, **kwargs)

    def _go_apart(self) -> None:
        """Has the workers notice that calls cannot be told apart here; this worker's share makes its mark its own."""
        self._end_turn()
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
