"""Turns objects into bytes for the way between controller and workers, and back.

Decides how a command, a result and an exception travel: as one pickle plus its large buffers beside it, because
the engine hands `bytes` on by reference but would copy whatever lies inside a pickle. Must not know what the objects
mean, nor which engine carries the bytes.
"""

from __future__ import annotations

import functools
import importlib
import io
import operator
import pickle
import sys
import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple

from moreh_ap.errors import WorkerError

# Below this a copy is cheaper than a separate buffer (one more object to send); measured at 16-64 KB, flat there.
OUT_OF_BAND_MIN_BYTES = 32 * 1024

_MAIN = "__main__"
_NUM_DONE = "_moreh_num_done"


class _Pickler(pickle.Pickler):
    """Pickles by reference, leaves large buffers out, and names classes of the user's script without finding them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep_inside)
        self.buffers: list[bytes] = []

    def _keep_inside(self, buffer: pickle.PickleBuffer) -> bool:
        """Called for each array: False sends it beside the pickle, True leaves it inside."""
        view = buffer.raw()
        if view.nbytes < OUT_OF_BAND_MIN_BYTES:
            return True
        self.buffers.append(view.tobytes())
        return False

    def reducer_override(self, obj: object) -> Any:
        # A class of the user's script reached this worker by value: the worker's own `__main__` does not have it, the
        # controller's does. Naming it is enough for the way home, and the controller finds the very same class.
        if isinstance(obj, type) and obj.__module__ == _MAIN:
            return _class_of_main, (obj.__qualname__,)
        return NotImplemented


class _AsidePickler(_Pickler):
    """Leaves large `bytes` objects out, too."""

    def __init__(self, file: io.BytesIO, aside_from_bytes: int) -> None:
        super().__init__(file)
        self._aside_from_bytes = aside_from_bytes
        self.aside: list[bytes] = []

    def persistent_id(self, obj: object) -> int | None:
        """Called for each object: a number sends it beside the pickle, as it is; None leaves it inside."""
        if type(obj) is not bytes or len(obj) < self._aside_from_bytes:
            return None
        self.aside.append(obj)
        return len(self.aside) - 1


class _TooLarge(Exception):
    """A pickle may have something inside that belongs beside it."""


class _SmallFile(io.BytesIO):
    """A pickle of at most some bytes, which has nothing inside that belongs beside it."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any) -> int:
        if len(data) >= self._limit:
            raise _TooLarge  # before it is copied
        return super().write(data)


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: Packed) -> None:
        super().__init__(io.BytesIO(packed.pickle), buffers=packed.buffers)
        self._aside = packed.aside

    def persistent_load(self, pid: int) -> bytes:
        return self._aside[pid]


def _class_of_main(qualname: str) -> type:
    found: type = functools.reduce(getattr, qualname.split("."), sys.modules[_MAIN])  # type: ignore[assignment]
    return found


class Place(NamedTuple):
    """Where in the shared memory of a machine a value lies."""

    start: int
    num_bytes: int


class SentPlace(NamedTuple):
    """Where in the memory of a host a value will lie, once the host has received the value of this number."""

    start: int
    num_bytes: int
    number: int


class Packed(NamedTuple):
    """One object on its way: the pickle, its array buffers, and the `bytes` objects that were left outside it.

    Arrays come back read-only, as views of the buffers that travelled: nothing is copied on arrival.
    """

    pickle: bytes
    buffers: tuple[bytes | memoryview | Place | SentPlace, ...] = ()
    aside: tuple[bytes, ...] = ()


def pack(obj: object, aside_from_bytes: int = OUT_OF_BAND_MIN_BYTES) -> Packed:
    """Returns `obj` as bytes that can be sent.

    Args:
        obj: The object.
        aside_from_bytes: From which length on `bytes` objects are left outside the pickle.

    Raises:
        Exception: whatever pickling the object raises (`pickle.PicklingError`, `TypeError`, ...).
    """
    if aside_from_bytes < OUT_OF_BAND_MIN_BYTES:
        return _pack_with_aside(obj, aside_from_bytes)
    small = _SmallFile(aside_from_bytes)
    try:  # most answers are smaller than that: without a call for each object
        pickler = _Pickler(small)
        pickler.dump(obj)
        return Packed(small.getvalue(), tuple(pickler.buffers))
    except _TooLarge:
        return _pack_with_aside(obj, aside_from_bytes)


def _pack_with_aside(obj: object, aside_from_bytes: int) -> Packed:
    file = io.BytesIO()
    pickler = _AsidePickler(file, aside_from_bytes)
    pickler.dump(obj)
    return Packed(file.getvalue(), tuple(pickler.buffers), tuple(pickler.aside))


def unpack(packed: Packed) -> object:
    """Returns the object that `pack` was given.

    Raises:
        Exception: whatever building the object raises, for instance `ImportError` where its class is unknown here.
    """
    if not packed.buffers and not packed.aside:
        return pickle.loads(packed.pickle)  # a third of the time
    return _Unpickler(packed).load()


class WorkerTraceback(Exception):
    """The traceback of an exception as the worker saw it; the `__cause__` of the exception raised in the controller.

    Attributes:
        rank: which worker raised.
        text: its formatted traceback.
        num_done: how many commands of the message were executed before the one that raised.
        place: " on " and the worker's host, where there are several; else empty.
    """

    def __init__(self, rank: int, text: str, num_done: int = 0, place: str = "") -> None:
        super().__init__(rank, text, num_done, place)
        self.rank, self.text, self.num_done, self.place = rank, text, num_done, place

    def __str__(self) -> str:
        return f"\n\nin worker {self.rank}{self.place}:\n{self.text}"


@dataclass(frozen=True)
class Failure:
    """An exception of a worker, ready to be sent.

    Attributes:
        rank: which worker raised.
        type_name: the name of its class.
        text: `str` of it.
        traceback: the formatted traceback.
        packed: the exception itself, or None where it does not survive pickling.
        num_done: how many commands of the message were executed before the one that raised.
    """

    rank: int
    type_name: str
    text: str
    traceback: str
    packed: Packed | None
    num_done: int = 0


def note_done(error: BaseException, num_done: int) -> None:
    """Notes on an exception how many commands of its message were executed before it was raised."""
    vars(error)[_NUM_DONE] = num_done


def capture_failure(error: BaseException, rank: int) -> Failure:
    """Returns `error` in a form that is sure to reach the controller. Called while the exception is being handled."""
    text = _text_of(error)
    formatted = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    num_done = vars(error).pop(_NUM_DONE, 0)
    return Failure(rank, type(error).__name__, text, formatted, _pack_if_it_survives(error, text), num_done)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # an exception class may have any __str__, and its failing must not hide the error
        return f"<{type(error).__name__} whose text cannot be made: {type(broken).__name__}>"


def _pack_if_it_survives(error: BaseException, text: str) -> Packed | None:
    """Packs the exception if it comes back as the same class with the same text, which many exception classes with
    a constructor of their own do not."""
    try:
        packed = pack(error)
        if type(error).__module__ != _MAIN:
            again = unpack(packed)
            if type(again) is not type(error) or str(again) != text:
                return None
        return packed
    except Exception:  # any failure here has one meaning: this exception has to travel as text
        return None


def restore_failure(failure: Failure, place: str = "") -> BaseException:
    """Returns the exception to raise in the controller: the original type where it survived the way, else a subclass
    of `WorkerError` with the name of the original. Its `__cause__` carries the worker's traceback.

    Args:
        failure: What the worker says.
        place: As in `WorkerTraceback`.
    """
    error: BaseException | None = None
    if failure.packed is not None:
        try:
            unpacked = unpack(failure.packed)
            error = unpacked if isinstance(unpacked, BaseException) else None
        except Exception:  # its class cannot be found or built in this process: the text has to do
            error = None
    if error is None:
        named = type(failure.type_name, (WorkerError,), {"__module__": WorkerError.__module__})
        error = named(failure.text or failure.type_name)
    error.__cause__ = WorkerTraceback(failure.rank, failure.traceback, failure.num_done, place)
    return error


def import_by_name(name: str) -> object:
    """Returns the object that `"package.module:Attribute"` names.

    Raises:
        ValueError: the name has no colon.
        ImportError, AttributeError: there is no such module or attribute.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r} is not of the form 'package.module:Attribute'")
    return operator.attrgetter(attribute)(importlib.import_module(module))
