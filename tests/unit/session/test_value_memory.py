"""Values that workers write into a file in memory of the controller are read there bit for bit."""

import contextlib
import os
from pathlib import Path

import pytest
import torch

from moreh_ap.protocol.messages.memory_files import BYTES_PER_WORKER
from moreh_ap.protocol.messages.state import StoredTensor
from moreh_ap.protocol.messages.tensors import StateRef, TensorData
from moreh_ap.runtime.worker.commands.stored_values import MIN_STORED_BYTES, writing_to
from moreh_ap.session import value_memory
from moreh_ap.session.value_memory import ReadAhead, ValueMemory

NUM = MIN_STORED_BYTES + 64  # elements: large in every dtype, and no multiple of a page

LARGE = {
    "float32": torch.arange(NUM, dtype=torch.float32),
    "bfloat16 in rows": torch.arange(NUM).to(torch.bfloat16).reshape(8, -1),
    "bool": torch.arange(NUM) % 3 == 0,
    "complex": torch.complex(torch.arange(NUM).float(), torch.ones(NUM)),
    "transposed": torch.arange(NUM, dtype=torch.float64).reshape(8, -1).t(),
    "with gaps": torch.arange(2 * NUM, dtype=torch.float32).reshape(-1, 2)[:, 0],
    "channels last": torch.arange(NUM).float().reshape(2, 4, 8, -1).contiguous(memory_format=torch.channels_last),
}


def read(tensors: list[torch.Tensor], rank: int = 0) -> list[torch.Tensor]:
    """Writes as worker `rank` and reads as the controller; all have to travel by the file."""
    with contextlib.closing(ValueMemory(rank + 1, is_shared=True)) as memory:
        with writing_to(memory.file, rank) as write:
            answers = [write(tensor) for tensor in tensors]
        assert all(isinstance(answer, StoredTensor) for answer in answers)
        return [memory.tensor(answer) for answer in answers]


@pytest.mark.parametrize("rank", [0, 1, 4095])
def test_values_are_bitwise_those_that_were_written(rank: int) -> None:
    for (name, tensor), found in zip(LARGE.items(), read(list(LARGE.values()), rank), strict=True):
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
        if name != "with gaps":
            assert found.stride() == tensor.stride(), name


def test_each_worker_writes_into_its_own_part() -> None:
    with contextlib.closing(ValueMemory(2, is_shared=True)) as memory:
        answers = []
        for rank in (0, 1):
            with writing_to(memory.file, rank) as write:
                answers.append(write(torch.full((NUM,), float(rank))))
        starts = [answer.start for answer in answers if isinstance(answer, StoredTensor)]
        assert starts == [0, BYTES_PER_WORKER]
        assert [memory.tensor(answer).unique().tolist() for answer in answers] == [[0.0], [1.0]]


def test_a_tensor_can_be_changed_and_leaves_nothing_behind() -> None:
    (found,) = read([LARGE["float32"]])
    found.add_(1)
    assert torch.equal(found, LARGE["float32"] + 1)
    assert "moreh-values" in Path("/proc/self/maps").read_text()
    before = len(os.listdir("/proc/self/fd"))
    kept = read([LARGE["float32"]] * 20)
    assert len(os.listdir("/proc/self/fd")) == before, "a tensor must not keep a descriptor open"
    del found, kept
    assert "moreh-values" not in Path("/proc/self/maps").read_text()


def test_values_are_copied_where_no_more_can_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_memory, "_mapped", lambda *_: None)
    assert all(map(torch.equal, read(list(LARGE.values())), LARGE.values()))


def test_what_cannot_be_written_into_the_file_is_answered_as_bytes() -> None:
    tensor = LARGE["float32"]
    memory = ValueMemory(1, is_shared=True)
    assert memory.file is not None
    with writing_to(memory.file, 0) as write:
        assert isinstance(write(torch.ones(4)), TensorData), "small"
        assert isinstance(write(torch.ones(NUM).to_sparse()), TensorData)
    os.truncate(memory.file.descriptor, 0)
    with writing_to(memory.file._replace(name="moreh-values-other"), 0) as write:
        assert isinstance(write(tensor), TensorData), "the descriptor is that of another file by now"
    memory.close()
    with writing_to(memory.file, 0) as write:
        answer = write(tensor)
    assert isinstance(answer, TensorData)
    assert torch.equal(ValueMemory(1, is_shared=False).tensor(answer), tensor)


def test_workers_of_other_machines_get_no_file() -> None:
    assert ValueMemory(1, is_shared=False).file is None


class FakeWorkers:
    """Stands for an outbox and the workers: tensors whose values are the number of changes, and what was read."""

    def __init__(self, num_bytes: int = 1 << 20, num: int = 40) -> None:
        self.num_posted = self.times_restarted = self.times_failed = 0
        self.order = [(StateRef("model0", "param", str(index)), num_bytes) for index in range(num)]
        self.read: list[list[str]] = []
        self.changes = 0
        self.ahead = ReadAhead(self, self.answer)

    def in_order(self) -> list[tuple[StateRef, int]]:
        return self.order

    def answer(self, refs: tuple[StateRef, ...]) -> list[torch.Tensor]:
        self.num_posted += 1
        self.read.append([ref.name for ref in refs])
        return [torch.tensor([float(ref.name), self.changes]) for ref in refs]

    def change(self) -> None:
        self.num_posted += 1
        self.changes += 1

    def value(self, index: int) -> list[float]:
        return self.ahead.read(self.order[index][0], self).tolist()


def test_tensors_that_are_read_in_order_come_in_few_messages() -> None:
    workers = FakeWorkers()
    assert [workers.value(index) for index in range(40)] == [[float(index), 0.0] for index in range(40)]
    assert [len(names) for names in workers.read] == [1, 5, 9, 17, 8]
    assert [int(name) for names in workers.read for name in names] == list(range(40)), "each is read once"


def test_a_message_brings_no_more_than_64_mib_along() -> None:
    workers = FakeWorkers(num_bytes=1 << 24)
    for index in range(40):
        workers.value(index)
    assert max(map(len, workers.read)) == 4


def test_nothing_that_was_read_ahead_outlasts_a_command() -> None:
    workers = FakeWorkers()
    workers.value(0), workers.value(1)
    assert workers.read == [["0"], ["1", "2", "3", "4", "5"]]
    workers.change()
    assert workers.value(2) == [2.0, 1.0]
    assert workers.read[2:] == [["2"]], "a run begins anew"
    workers.value(3)
    workers.times_restarted += 1
    workers.value(4)
    assert workers.read[-1] == ["4"]


def test_a_tensor_that_is_read_twice_is_read_anew_and_others_come_alone() -> None:
    workers = FakeWorkers()
    for index in (0, 1, 1, 30, 7, 39):
        workers.value(index)
    assert workers.read == [["0"], ["1", "2", "3", "4", "5"], ["1"], ["30"], ["7"], ["39"]]
