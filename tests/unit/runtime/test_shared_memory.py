"""Large tensors of commands lie in memory that the workers read; its places are used again once a command is done."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import torch

from moreh_ap.protocol.encoding import OUT_OF_BAND_MIN_BYTES, Packed, Place, unpack
from moreh_ap.protocol.messages.tensors import TensorData
from moreh_ap.runtime import shared_memory
from moreh_ap.runtime.shared_memory import SharedMemory, SharedMemoryReader

NUM_ROWS = OUT_OF_BAND_MIN_BYTES  # of one float32 each: above the size from which a tensor travels beside the pickle


@pytest.fixture
def memory():
    made = SharedMemory()
    yield made
    made.close()


def data(fill: float, num_rows: int = NUM_ROWS) -> TensorData:
    return TensorData.of(torch.full((num_rows,), fill))


def pack(memory: SharedMemory, command: object) -> Packed:
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(command, protocol=5, buffer_callback=buffers.append)
    return Packed(content, memory.store(buffers))


def places(packed: Packed) -> list[Place]:
    return [one for one in packed.buffers if isinstance(one, Place)]


def received(memory: SharedMemory, packed: Packed):
    with SharedMemoryReader(memory.descriptor).values(packed.buffers) as buffers:
        found = unpack(packed._replace(buffers=buffers))
        return [one.tensor() if isinstance(one, TensorData) else one for one in found]


def test_a_large_tensor_is_read_from_the_memory_and_a_small_one_from_the_command(memory):
    packed = pack(memory, [data(1.5), data(2.5, 3)])
    assert [place.num_bytes for place in places(packed)] == [4 * NUM_ROWS]
    assert len(packed.pickle) < 1000
    large, small = received(memory, packed)
    assert torch.equal(large, torch.full((NUM_ROWS,), 1.5)) and torch.equal(small, torch.full((3,), 2.5))


def test_places_are_used_again_only_once_released(memory):
    first, second = pack(memory, [data(1.0)]), pack(memory, [data(2.0)])
    assert places(first) != places(second)
    memory.release(first.buffers)
    assert places(pack(memory, [data(3.0)])) == places(first)
    assert torch.equal(received(memory, second)[0], torch.full((NUM_ROWS,), 2.0))


def test_neighbouring_free_places_become_one(memory):
    packed = [pack(memory, data(float(n))) for n in range(4)]
    for index in (0, 2, 1):
        memory.release(packed[index].buffers)
    (joined,) = places(pack(memory, data(9.0, 3 * NUM_ROWS)))
    assert joined == Place(0, 12 * NUM_ROWS)


def test_a_value_that_is_read_too_late_is_an_error_instead_of_another_value(memory):
    packed = pack(memory, [data(1.0)])
    with SharedMemoryReader(memory.descriptor).values(packed.buffers) as buffers:
        (kept,) = unpack(packed._replace(buffers=buffers))
    with pytest.raises(ValueError, match="released memoryview"):
        kept.tensor()


def test_arrays_which_a_worker_may_keep_are_not_in_the_memory(memory):
    packed = pack(memory, [np.ones(NUM_ROWS)])
    assert not places(packed)
    assert received(memory, packed)[0].sum() == NUM_ROWS


def test_what_does_not_fit_travels_in_the_command(memory, monkeypatch):
    monkeypatch.setattr(shared_memory, "_LIMIT_BYTES", 6 * NUM_ROWS)
    first, second = pack(memory, [data(1.0)]), pack(memory, [data(2.0)])
    assert places(first) and not places(second)
    assert received(memory, second)[0][0] == 2.0
    memory.release(first.buffers)
    assert places(pack(memory, [data(3.0)]))


def test_nothing_is_written_once_it_is_closed(tmp_path):
    closed = SharedMemory()
    descriptor = closed.descriptor
    closed.close()
    with open(tmp_path / "of the script", "w+b") as file:
        if file.fileno() != descriptor:
            os.dup2(file.fileno(), descriptor)
        assert not places(pack(closed, [data(1.0)]))
        assert file.seek(0, os.SEEK_END) == 0
