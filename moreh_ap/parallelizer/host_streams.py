"""The random streams of Python and numpy, from which a forward may draw: teacher forcing, SpecAugment.

Decides how their state is kept, compared and put back. Must not know who draws what.

[Note: decisions, not rows]
What a forward draws there decides for all rows (`if random.random() < ratio`), so all workers draw the same from the
same state, and the script goes on where they stopped. A forward that draws more for more rows cannot be split: the
proof compares where the streams stand after one row and after two.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


@cache
def _numpy_random() -> Any:
    try:
        from numpy import random as numpy_random
    except ImportError:
        return None
    return numpy_random


def host_streams() -> bytes:
    """Where the streams of this process stand; equal bytes for equal places."""
    of_numpy = _numpy_random()
    return pickle.dumps((random.getstate(), None if of_numpy is None else of_numpy.get_state()))


def set_host_streams(state: bytes) -> None:
    """Go on from `state`, as `host_streams` gave it in this or another process."""
    of_python, of_numpy = pickle.loads(state)
    random.setstate(of_python)
    if of_numpy is not None and _numpy_random() is not None:
        _numpy_random().set_state(of_numpy)


def start_host_streams(state: bytes | None) -> Callable[[], bytes | None]:
    """Go on from `state`; returns what tells where the streams stand then, None if nothing was drawn.

    Args:
        state: As `host_streams` gave it; None where no draws are expected. Workers start alike even then.
    """
    if state is not None:
        set_host_streams(state)
        return lambda: None if (now := host_streams()) == state else now
    _seed()
    return lambda: None if _draw() == _first_draw() else host_streams()


def _seed() -> None:
    random.seed(0)
    if _numpy_random() is not None:
        _numpy_random().seed(0)


def _draw() -> tuple[float, float]:
    """Tells streams that nobody has drawn from in a tenth of the time that comparing states takes."""
    return random.random(), 0.0 if _numpy_random() is None else _numpy_random().random_sample()


@cache
def _first_draw() -> tuple[float, float]:
    with host_streams_restored():
        _seed()
        return _draw()


@contextmanager
def host_streams_restored() -> Iterator[None]:
    """Puts the streams back after the block."""
    before = host_streams()
    try:
        yield
    finally:
        set_host_streams(before)
