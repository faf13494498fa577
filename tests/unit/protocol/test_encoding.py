"""What a worker's answers look like on their way: what is inside the pickle, and what is beside it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from moreh_ap.protocol import encoding
from moreh_ap.protocol.encoding import OUT_OF_BAND_MIN_BYTES, Failure, pack, restore_failure, unpack


@pytest.mark.parametrize("size", [0, 1, OUT_OF_BAND_MIN_BYTES - 1, OUT_OF_BAND_MIN_BYTES, 1 << 16, 1 << 20])
def test_large_bytes_are_beside_the_pickle_as_they_are(size):
    value = bytes(size)
    packed = pack(("a", [value, 1]))
    is_aside = size >= OUT_OF_BAND_MIN_BYTES
    assert len(packed.aside) == is_aside and not packed.buffers
    assert len(packed.pickle) < OUT_OF_BAND_MIN_BYTES + 100
    assert not is_aside or packed.aside[0] is value
    assert unpack(packed) == ("a", [value, 1])


def test_many_small_values_are_inside_together():
    values = [bytes([index]) * 1000 for index in range(100)]
    packed = pack(values)
    assert not packed.aside and unpack(packed) == values


def test_arrays_and_bytes_of_one_answer():
    array, small = np.arange(1 << 14), np.arange(4)
    for value in (b"x", b"x" * (1 << 17)):
        packed = pack({"array": array, "small": small, "value": value})
        assert [len(buffer) for buffer in packed.buffers] == [array.nbytes]
        assert len(packed.aside) == (len(value) > 1)
        found = unpack(packed)
        assert np.array_equal(found["array"], array) and np.array_equal(found["small"], small)
        assert found["value"] == value


def test_a_limit_of_one_byte_leaves_all_bytes_out():
    assert pack([b"abc", b"", 1], aside_from_bytes=1).aside == (b"abc",)


def test_small_answers_are_not_looked_at_object_by_object(monkeypatch):
    monkeypatch.setattr(encoding, "_AsidePickler", None)
    assert unpack(pack([(index, str(index)) for index in range(1000)]))[-1] == (999, "999")
    with pytest.raises(TypeError):
        pack(bytes(OUT_OF_BAND_MIN_BYTES))


def test_what_pickling_raises_is_raised():
    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        pack(lambda: None)


def test_the_traceback_of_a_worker_says_where_it_is():
    failure = Failure(
        1, "FileNotFoundError", "no such file", "Traceback: ...", pack(FileNotFoundError(2, "no such file"))
    )
    assert str(restore_failure(failure).__cause__) == "\n\nin worker 1:\nTraceback: ..."
    error = restore_failure(failure, " on node2")
    assert str(error.__cause__) == "\n\nin worker 1 on node2:\nTraceback: ..." and type(error) is FileNotFoundError
    assert str(pickle.loads(pickle.dumps(error.__cause__))) == str(error.__cause__)
