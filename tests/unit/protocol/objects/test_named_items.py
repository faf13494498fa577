"""Entries that lie flat and name their item: boxes of pictures, points of clouds."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.protocol.objects.named_items import find_named


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_boxes_go_with_the_picture_in_their_first_column(dtype):
    pictures, boxes = torch.arange(4.0)[:, None, None], torch.tensor([[0, 7], [2, 8], [2, 9], [3, 6]], dtype=dtype)
    boxes = torch.cat([boxes, boxes[-1:]])
    found = find_named(((pictures, boxes), {"size": 4}))
    assert found is not None and found.count == 4
    (some, own), kwargs = found.select([1, 2, 3])
    assert some.flatten().tolist() == [1, 2, 3] and kwargs == {"size": 3}
    assert own.tolist() == [[1, 8], [1, 9], [2, 6], [2, 6]] and own.dtype == dtype
    assert boxes[0].tolist() == [0, 7]


def test_as_many_boxes_as_pictures_stay_boxes():
    found = find_named(((torch.rand(3, 2), torch.tensor([[0.0, 1.0], [0.0, 2.0], [2.0, 3.0]])), {}))
    assert found is not None
    (some, own), _ = found.select([0, 1])
    assert len(some) == 2 and own.tolist() == [[0, 1], [0, 2]]


def test_points_go_with_the_cloud_that_a_vector_names():
    points, clouds = torch.arange(6.0)[:, None], torch.tensor([0, 0, 1, 1, 1, 2])
    found = find_named(((points, clouds), {"labels": torch.tensor([7, 8, 9])}))
    assert found is not None and found.count == 3
    (own, names), kwargs = found.select([1, 2])
    assert own[:, 0].tolist() == [2, 3, 4, 5] and names.tolist() == [0, 0, 0, 1]
    assert kwargs["labels"].tolist() == [8, 9]


@pytest.mark.parametrize("numbers", [[0, 2, 1], [0, 1, 2], [0.0, 0.5, 1.0], [0, 0, 0], [-1, 0, 0], [0, 0, 9]])
def test_numbers_that_fall_or_name_nothing_are_no_names(numbers):
    assert find_named(((torch.rand(4, 2), torch.tensor(numbers)), {})) is None


@pytest.mark.parametrize("numbers", [[0.0, 0.0, float("inf")], [0.0, -float("inf"), 0.0], [0.0, 0.0, float("nan")]])
def test_numbers_that_are_not_finite_are_no_names(numbers):
    mask = torch.tensor(numbers)
    assert find_named(((torch.rand(3, 2), mask), {})) is None
    assert find_named(((torch.rand(4, 2), mask[:, None].expand(-1, 3)), {})) is None


def test_times_are_no_names():
    assert find_named(((torch.rand(3, 2), torch.tensor([0, 0, 1_700_000_000])), {})) is None
