"""The positions of the random streams of Python and NumPy, as bytes that can be compared.

Decides how a position is read. Must not know which code draws, or why positions are compared.

[Note: states in memory]
The state of either Mersenne Twister is 624 words and an index into them. `random.getstate` makes an object of each
word, `numpy.random.get_state` copies word by word, and each forward reads positions twice. Both generators keep the
state in one piece of memory, whose bytes are copied at once: NumPy returns its address, and Python's follows the object
header of the generator. Python and NumPy also keep the second number of each pair that their normal distributions
draw: Python in an attribute, NumPy in the object of the generator, at an offset that is found by a trial draw.

Before these bytes are used they are compared once with the state that the public functions return. If they differ
(another implementation of Python, another generator of NumPy), the public functions are used instead.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import struct
import sys
from typing import Any

_WORDS = 624
_STATE_BYTES = 4 * (_WORDS + 1)
_HEAD_BYTES = object.__basicsize__  # of each object
_ALIGNMENT = 8  # of a number in memory
_bytes_at = ctypes.string_at


def host_position() -> tuple[object, object]:
    """Returns the positions of the random streams of Python and NumPy; None for NumPy's before it is imported."""
    numpy = sys.modules.get("numpy.random")
    of_numpy: Any = None
    python: Any = _place_of_python()
    of_python = random.getstate() if python is None else (_bytes_at(python[0], _STATE_BYTES), python[1].gauss_next)
    if numpy is not None:
        place = _place_of_numpy(numpy.get_bit_generator())
        if place is None:
            of_numpy = pickle.dumps(numpy.get_state(legacy=False))
        else:
            of_numpy = _bytes_at(place[0], _STATE_BYTES), _bytes_at(*place[1:])
    return of_python, of_numpy


@functools.cache
def _place_of_python() -> tuple[int, Any] | None:
    """Returns the address of the state of Python's generator, and the generator; None where that is not known."""
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    _, words, _ = generator.getstate()
    start = id(generator) + _HEAD_BYTES
    told = struct.pack(f"={_WORDS + 1}I", words[-1], *words[:-1])
    if type(generator).__basicsize__ < _HEAD_BYTES + _STATE_BYTES or _bytes_at(start, _STATE_BYTES) != told:
        return None
    return start, generator


@functools.lru_cache(maxsize=1)
def _place_of_numpy(generator: Any) -> tuple[int, int, int] | None:
    """Returns where the state of NumPy's stream is, and what a normal distribution has left, with the size of that.

    Args:
        generator: From which the stream draws: another one after `numpy.random.set_bit_generator`.

    Returns:
        Addresses, and bytes; None where they are not known.
    """
    stream: Any = sys.modules["numpy.random"].get_state.__self__
    state, left = stream.get_state(legacy=False), _place_of_what_is_left(type(stream))
    if state["bit_generator"] != "MT19937" or left is None:
        return None
    start, words = generator.ctypes.state_address, state["state"]
    if _bytes_at(start, _STATE_BYTES) != words["key"].tobytes() + struct.pack("=i", words["pos"]):
        return None
    return start, id(stream) + left.start, left.stop - left.start


def _place_of_what_is_left(cls: Any) -> slice | None:
    """Returns where in the memory of a stream of a class is what a normal distribution has left for its next call.

    In bytes from the beginning of the object; None where it is elsewhere.
    """
    stream, found = cls(0), []
    for _ in range(3):
        found.append(_bytes_at(id(stream) + _HEAD_BYTES, cls.__basicsize__ - _HEAD_BYTES))
        stream.standard_normal()  # the first one leaves a number, the second takes it
    changed = [at for at, values in enumerate(zip(*found)) if len(set(values)) > 1]
    if not found[0] != found[1] != found[2]:
        return None
    first, last = changed[0] // _ALIGNMENT * _ALIGNMENT, changed[-1] // _ALIGNMENT * _ALIGNMENT
    return slice(_HEAD_BYTES + first, _HEAD_BYTES + last + _ALIGNMENT)
