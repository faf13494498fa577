"""The inputs of a call are decoded when asked for, and a worker decodes its own rows alone."""

from __future__ import annotations

import mmap
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from moreh_ap.protocol.messages.tensors import THREADS_PAY_BYTES, ArrivedTensors, OutputRef, TensorData

CPU = torch.device("cpu")
HELD = torch.arange(6.0).reshape(3, 2)


class Decoder:
    """Decodes as a worker does, and counts."""

    def __init__(self):
        self.decoded = []

    def __call__(self, data):
        self.decoded.append(data)
        return data.on(CPU) if isinstance(data, TensorData) else HELD


@pytest.fixture
def decode():
    return Decoder()


def arrived(decode, *tensors):
    return ArrivedTensors(
        [TensorData.of(one) if isinstance(one, torch.Tensor) else one for one in tensors], decode, CPU
    )


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (2, 5), (1, 1), (0, 5)])
def test_rows_of_contiguous_tensors_are_decoded_alone(decode, start, stop):
    x, mask = torch.randn(5, 3, 4), torch.rand(5) > 0.5
    found = arrived(decode, x, mask).rows([True, True], start, stop)
    assert torch.equal(found[0], x[start:stop]) and torch.equal(found[1], mask[start:stop])
    assert not decode.decoded
    assert found[0].untyped_storage().nbytes() == 4 * 12 * (stop - start)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(5, 3, 2, 4, 4).to(memory_format=torch.channels_last_3d),
        torch.randn(5, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(5, 2, 7).transpose(1, 2),
        torch.randn(2, 7, 5).permute(2, 1, 0).contiguous().transpose(1, 2),
    ],
    ids=["channels last", "channels last 3d", "one pixel", "transposed items", "permuted items"],
)
def test_rows_in_another_order_are_decoded_alone_if_rows_are_outermost(decode, tensor):
    (found,) = arrived(decode, tensor).rows([True], 1, 3)
    assert torch.equal(found, tensor[1:3]) and found.stride() == tensor[1:3].stride()
    assert not decode.decoded
    assert found.untyped_storage().nbytes() == 2 * tensor[0].nbytes


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(4, 5).t(), torch.randn(3, 4, 2).permute(1, 0, 2), torch.randn(3, 0)],
    ids=["transposed", "time first", "empty"],
)
def test_tensors_whose_rows_are_not_outermost_are_decoded_whole_and_cut(decode, tensor):
    (found,) = arrived(decode, tensor).rows([True], 1, 2)
    assert torch.equal(found, tensor[1:2])
    assert len(decode.decoded) == 1


def test_what_is_not_cut_or_is_on_the_workers_is_decoded_once(decode):
    inputs = arrived(decode, torch.ones(4), OutputRef(0, 0), torch.randn(3, 2))
    first, held, _ = inputs.rows([False, True, True], 1, 3)
    assert torch.equal(first, torch.ones(4)) and torch.equal(held, HELD[1:3])
    whole = inputs.whole()
    assert whole[0] is first and torch.equal(whole[1], HELD)
    assert len(decode.decoded) == 3


def test_layouts_need_no_values(decode):
    x = torch.randn(2, 3).t()
    layouts = arrived(decode, x, torch.eye(2).to_sparse()).layouts()
    assert layouts == [((3, 2), torch.float32, (1, 3)), ((2, 2), torch.float32, False)]
    assert not decode.decoded
    assert arrived(decode, OutputRef(0, 0)).layouts() == [((3, 2), torch.float32, (2, 1))]


LARGE = {
    "contiguous": torch.randn(6, 4096),
    "channels last": torch.randn(4, 3, 64, 64).to(memory_format=torch.channels_last),
    "transposed": torch.randn(256, 128).t(),
    "rows of a larger one": torch.randn(16, 4096)[4:12],
    "one row": torch.randn(1, 3, 128, 128).to(memory_format=torch.channels_last),
    "with gaps": torch.randn(64, 2048)[:, ::2],
    "repeated": torch.randn(1, 16384).expand(3, -1),
    "bfloat16": torch.randn(8, 8192).bfloat16(),
    "truth values": torch.rand(8, 8192) > 0.5,
    "complex": torch.randn(4, 4096, dtype=torch.complex64),
}
HAVE_GAPS = {"with gaps", "repeated"}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_tensor_is_lent_without_a_copy_if_its_elements_lie_densely(name):
    tensor = LARGE[name]
    lent = TensorData.of(tensor, lend=True)
    assert np.shares_memory(np.frombuffer(lent.data, np.uint8), lent.data)
    is_lent = lent.data.__array_interface__["data"][0] == tensor.data_ptr()
    assert is_lent == (name not in HAVE_GAPS)
    for data in (lent, lent.owned(), TensorData.of(tensor), pickle.loads(pickle.dumps(lent, 5))):
        found = data.tensor()
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
        assert name in HAVE_GAPS or found.stride() == tensor.stride()


@pytest.mark.parametrize("encode", [TensorData.of, lambda tensor: TensorData.of(tensor, lend=True).owned()])
@pytest.mark.parametrize("num_rows", [3, 9000])
def test_later_changes_of_a_tensor_do_not_matter_to_what_is_kept(encode, num_rows):
    tensor = torch.ones(num_rows, 2)
    kept = encode(tensor)
    tensor.zero_()
    assert torch.equal(kept.tensor(), torch.ones(num_rows, 2))


def test_what_is_lent_is_small_or_the_memory_of_the_tensor():
    small, large = torch.ones(3), torch.ones(9000)
    lent = [TensorData.of(small, lend=True), TensorData.of(large, lend=True)]
    small.zero_(), large.zero_()
    assert [float(one.tensor().sum()) for one in lent] == [3.0, 0.0]


def test_a_decoded_tensor_has_memory_of_its_own():
    sent = bytearray(TensorData.of(torch.ones(4)).data)
    data = TensorData(torch.float32, (4,), (1,), memoryview(sent).toreadonly())
    found = data.tensor()
    sent[:] = bytes(16)
    found += 1
    assert found.tolist() == [2.0] * 4 and data.tensor().tolist() == [0.0] * 4


def test_on_a_gpu_bytes_are_copied_once_into_pinned_memory(monkeypatch):
    pinned = []

    def empty(*args, pin_memory=False, make=torch.empty, **kwargs):
        made = make(*args, **kwargs)
        if pin_memory:
            pinned.append(made)
        return made

    monkeypatch.setattr(torch, "empty", empty)
    batch = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    rows = TensorData.of(batch).rows(1, 3)
    on_device = rows.on(torch.device("meta"))
    assert on_device.device.type == "meta" and on_device.stride() == batch[1:3].stride()
    (block,) = pinned
    assert torch.equal(block.view(torch.float32), batch[1:3].permute(0, 2, 3, 1).flatten())
    assert rows.on(CPU).device == CPU and replace(rows, on_device=False).on(torch.device("meta")).device == CPU
    assert TensorData.of(torch.eye(2).to_sparse()).on(torch.device("meta")).is_sparse
    assert len(pinned) == 1


@pytest.mark.parametrize("num_bytes", [100_000, THREADS_PAY_BYTES])
def test_threads_of_pytorch_copy_large_tensors_alone(monkeypatch, num_bytes):
    """They are woken for more than 32 KB, which took milliseconds beside another process at work."""
    copied = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda own, other: copied.append(own.nbytes) or copy(own, other))
    tensor = torch.arange(num_bytes // 8)
    lent = TensorData.of(tensor, lend=True)
    with mmap.mmap(-1, num_bytes + 64) as memory:
        lent.data.write_to(memory, 64)
        assert memory[64:] == bytes(lent.data) and memory[:64] == bytes(64)
    assert torch.equal(lent.tensor(), tensor)
    assert copied == ([num_bytes] * 2 if num_bytes == THREADS_PAY_BYTES else [])


def test_a_scalar_has_no_rows():
    assert TensorData.of(torch.tensor(1.0)).rows(0, 1) is None
    empty = TensorData.of(torch.ones(0, 3)).rows(0, 0)
    assert empty is not None and empty.tensor().shape == (0, 3)
