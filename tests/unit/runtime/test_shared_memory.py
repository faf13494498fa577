"""Large tensors of commands lie in memory that the workers read; its places are used again once a command is done."""

from __future__ import annotations

import os
import pickle
import threading

import numpy as np
import pytest
import torch

from moreh_ap.protocol.encoding import OUT_OF_BAND_MIN_BYTES, Packed, Place, SentPlace, unpack
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


class Hosts:
    """Two hosts with two workers each; what is sent to them waits until it is delivered."""

    def __init__(self):
        self.descriptors = [shared_memory.make_host_memory() for _ in range(2)]
        self.keepers = [SharedMemoryReader(descriptor) for descriptor in self.descriptors]
        self.sent = []
        self.memory = SharedMemory(is_shared=False)

    def carry(self, host, number, start, value):
        self.sent.append((host, number, start, value))

    def deliver(self, index=0):
        host, *value = self.sent.pop(index)
        self.keepers[host].keep(*value)

    def read(self, host, packed):
        with SharedMemoryReader(self.descriptors[host]).values(packed.buffers) as buffers:
            return unpack(packed._replace(buffers=buffers)).tensor().clone()

    def read_later(self, host, packed):
        """Returns a thread that reads, and where what it has read will be."""
        found = []
        thread = threading.Thread(target=lambda: found.append(self.read(host, packed)), daemon=True)
        thread.start()
        return thread, found


@pytest.fixture
def hosts():
    made = Hosts()
    made.memory.carry_by(made.carry, num_hosts=2, per_host=2)
    yield made
    if made.memory.descriptor >= 0:
        made.memory.close()
    for descriptor in made.descriptors:
        os.close(descriptor)


def test_values_travel_in_the_command_until_hosts_are_there():
    memory = SharedMemory(is_shared=False)
    assert not places(pack(memory, data(1.0)))
    memory.close()


def test_a_value_is_sent_once_to_each_host_and_read_by_all_of_its_workers(hosts):
    packed = pack(hosts.memory, data(1.5))
    assert [(host, len(value)) for host, _, _, value in hosts.sent] == [(0, 4 * NUM_ROWS), (1, 4 * NUM_ROWS)]
    (place,) = packed.buffers
    assert isinstance(place, SentPlace) and len(packed.pickle) < 1000
    for _ in range(2):
        hosts.deliver()
    for host in (0, 0, 1, 1):
        assert torch.equal(hosts.read(host, packed), torch.full((NUM_ROWS,), 1.5))


def test_what_one_worker_gets_is_sent_to_its_host_alone(hosts):
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(data(1.0), protocol=5, buffer_callback=buffers.append)
    hosts.memory.store(buffers, rank=2)
    assert [host for host, *_ in hosts.sent] == [1]


def test_a_worker_waits_for_its_value_in_whatever_order_values_arrive(hosts):
    first, second = pack(hosts.memory, data(1.0)), pack(hosts.memory, data(2.0))
    thread, found = hosts.read_later(0, first)
    hosts.deliver(2)  # the second value, at host 0
    assert torch.equal(hosts.read(0, second), torch.full((NUM_ROWS,), 2.0))
    thread.join(0.05)
    assert not found
    hosts.deliver(0)
    thread.join(5)
    assert torch.equal(found[0], torch.full((NUM_ROWS,), 1.0))


def test_a_place_that_is_used_again_has_not_the_earlier_value(hosts):
    first = pack(hosts.memory, data(1.0))
    hosts.deliver()
    hosts.memory.release(first.buffers)
    hosts.sent.clear()
    again = pack(hosts.memory, data(2.0))
    assert again.buffers[0].start == first.buffers[0].start
    thread, found = hosts.read_later(0, again)
    thread.join(0.05)
    assert not found
    hosts.deliver()
    thread.join(5)
    assert torch.equal(found[0], torch.full((NUM_ROWS,), 2.0))


def test_a_host_without_memory_is_an_error_where_the_value_is_read(hosts, monkeypatch):
    packed = pack(hosts.memory, data(1.0))

    def pwrite(*unused):
        raise OSError("no memory")

    monkeypatch.setattr(os, "pwrite", pwrite)
    hosts.deliver()
    with pytest.raises(MemoryError, match="no memory left"):
        hosts.read(0, packed)


def test_no_value_is_sent_once_it_is_closed(hosts):
    hosts.memory.close()
    assert not places(pack(hosts.memory, data(1.0))) and not hosts.sent
