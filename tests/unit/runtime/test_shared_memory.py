"""Large tensors of commands lie in memory that the workers read; its places are used again once a command is done."""

from __future__ import annotations

import os
import pickle

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


def test_what_is_lent_is_written_by_a_mapping_where_the_file_has_memory(memory, monkeypatch):
    batch, written = torch.ones(NUM_ROWS), []
    monkeypatch.setattr(os, "pwrite", lambda *args, pwrite=os.pwrite: written.append(args[2]) or pwrite(*args))
    packed = []
    for step in range(3):
        packed.append(pack(memory, [TensorData.of(batch.fill_(step), lend=True)]))
        if step == 1:
            memory.release(packed[0].buffers)
    assert written == [0, 4 * NUM_ROWS], "the third has the place of the first"
    batch.fill_(7.0)  # by the script
    assert [float(received(memory, one)[0].max()) for one in packed[1:]] == [1.0, 2.0]
    assert places(packed[2]) == places(packed[0])
    memory.release([*packed[1].buffers, *packed[2].buffers])
    twice = pack(memory, [TensorData.of(torch.full((2 * NUM_ROWS,), 5.0), lend=True)])
    assert len(written) == 2 and torch.equal(received(memory, twice)[0], torch.full((2 * NUM_ROWS,), 5.0))


def test_places_that_could_not_be_written_are_not_written_by_a_mapping(memory, monkeypatch):
    def refuse(*args):
        raise OSError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        batch = torch.ones(NUM_ROWS)
        in_command = pack(memory, [TensorData.of(batch, lend=True)])
    batch.zero_()
    assert not places(in_command) and received(memory, in_command)[0].min() == 1.0
    behind = pack(memory, [data(2.0, 2 * NUM_ROWS)])
    first = pack(memory, [TensorData.of(batch + 3, lend=True)])
    assert places(first) == [Place(0, 4 * NUM_ROWS)]
    assert received(memory, first)[0].min() == 3.0 and received(memory, behind)[0].min() == 2.0


def test_what_is_lent_and_does_not_fit_is_copied_into_the_command(memory, monkeypatch):
    monkeypatch.setattr(shared_memory, "_LIMIT_BYTES", 0)
    batch = torch.ones(NUM_ROWS)
    packed = pack(memory, [TensorData.of(batch, lend=True)])
    batch.zero_()
    assert not places(packed) and received(memory, packed)[0].min() == 1.0


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


def test_values_that_are_taken_out_of_the_memory_outlive_it():
    memory = SharedMemory()
    packed = pack(memory, data(3.0))
    assert places(packed)
    alone = memory.taken_out(packed)
    memory.close()
    assert not places(alone) and torch.equal(unpack(alone).on(torch.device("cpu")), torch.full((NUM_ROWS,), 3.0))
    assert memory.taken_out(packed) == packed, "there is nothing to read any more"
    assert memory.taken_out([packed]) == [packed]


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
        self.sent = []
        self.memory = SharedMemory(is_shared=False)

    def carry(self, host, number, start, value):
        self.sent += [(one, number, start, value) for one in ((0, 1) if host is None else (host,))]

    def deliver(self, index=0):
        """Does what the agent of a host does (`command_relay.py`)."""
        host, _, start, value = self.sent.pop(index)
        os.pwrite(self.descriptors[host], value, start)

    def fetch(self, place):
        """Returns a value from the first host (`HostConnection.read_value`)."""
        return os.pread(self.descriptors[0], place.num_bytes, place.start)

    def read(self, host, packed):
        with SharedMemoryReader(self.descriptors[host]).values(packed.buffers) as buffers:
            return unpack(packed._replace(buffers=buffers)).tensor().clone()


@pytest.fixture
def hosts():
    made = Hosts()
    made.memory.carry_by(made.carry, 2, made.fetch)
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


def test_values_have_places_of_their_own_until_released_and_numbers_for_ever(hosts):
    first, second = pack(hosts.memory, data(1.0)), pack(hosts.memory, data(2.0))
    hosts.memory.release(first.buffers)
    again = pack(hosts.memory, data(3.0))
    assert again.buffers[0].start == first.buffers[0].start != second.buffers[0].start
    assert [packed.buffers[0].number for packed in (first, second, again)] == [1, 2, 3]
    for _ in range(6):
        hosts.deliver()
    assert torch.equal(hosts.read(0, second), torch.full((NUM_ROWS,), 2.0))
    assert torch.equal(hosts.read(1, again), torch.full((NUM_ROWS,), 3.0))


def test_a_host_without_memory_is_an_error_where_the_value_is_read(hosts):
    packed, later = pack(hosts.memory, data(1.0)), pack(hosts.memory, data(2.0))
    for _ in range(4):
        hosts.deliver()
    reader = SharedMemoryReader(hosts.descriptors[0])
    reader.missing.add(packed.buffers[0].number)
    with pytest.raises(MemoryError, match="this host has no memory left"), reader.values(packed.buffers):
        pass
    with reader.values(later.buffers) as (value,):
        assert len(value) == 4 * NUM_ROWS


def test_values_are_read_back_from_this_machine_or_a_host(memory, hosts):
    packed = pack(memory, [data(1.5), data(2.5, 3)])
    for one in (packed, there := pack(hosts.memory, [data(1.5), data(2.5, 3)])):
        if one is there:
            hosts.deliver()
        owner = hosts.memory if one is there else memory
        large, small = pickle.loads(one.pickle, buffers=owner.read(one.buffers))
        assert torch.equal(large.tensor(), torch.full((NUM_ROWS,), 1.5)) and small.tensor().tolist() == [2.5] * 3
    hosts.memory.carry_by(hosts.carry, 2, hosts.fetch)
    with pytest.raises(OSError, match="lost with the workers"):
        hosts.memory.read(there.buffers)


def test_no_value_is_sent_once_it_is_closed(hosts):
    hosts.memory.close()
    assert not places(pack(hosts.memory, data(1.0))) and not hosts.sent


def test_values_that_earlier_connections_carried_are_gone(hosts):
    before = pack(hosts.memory, data(1.0))
    assert not hosts.memory.is_gone(before.buffers)
    hosts.memory.carry_by(hosts.carry, 2, hosts.fetch)
    after = pack(hosts.memory, data(2.0))
    assert hosts.memory.is_gone(before.buffers) and not hosts.memory.is_gone(after.buffers)


def test_values_in_memory_of_this_machine_stay(memory):
    assert not memory.is_gone(pack(memory, [data(1.0), data(2.0, 3)]).buffers)
