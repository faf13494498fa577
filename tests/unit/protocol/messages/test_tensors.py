"""The inputs of a call are decoded when asked for, and a worker decodes its own rows alone."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.protocol.messages.tensors import ArrivedTensors, OutputRef, TensorData

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
    [torch.randn(4, 5).t(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)],
    ids=["transposed", "channels last"],
)
def test_tensors_in_another_order_are_decoded_whole_and_cut(decode, tensor):
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


def test_a_scalar_has_no_rows():
    assert TensorData.of(torch.tensor(1.0)).rows(0, 1) is None
    empty = TensorData.of(torch.ones(0, 3)).rows(0, 0)
    assert empty is not None and empty.tensor().shape == (0, 3)
