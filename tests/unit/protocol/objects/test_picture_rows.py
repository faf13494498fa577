"""Rows of tokens with pictures that lie one behind the other, and some of them alone."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.protocol.objects.batch_items import find_items
from moreh_ap.protocol.objects.picture_rows import find_pictures

PICTURE, VIDEO = 90, 91
GRIDS = torch.tensor([[1, 2, 4], [1, 2, 2], [1, 4, 4], [1, 2, 2]])
"""Of 8, 4, 16 and 4 patches, of which four share a token."""
OWNERS = [0, 0, 2, 3]
"""The row of each picture; row 1 has none."""


def tokens(asked: list[int], number: int = PICTURE, length: int = 12) -> torch.Tensor:
    """Rows that have a number so many times, among others that all differ."""
    ids = torch.arange(len(asked) * length).view(len(asked), length) + 200
    for row, count in zip(ids, asked):
        row[2 : 2 + count] = number
    return ids


def patches(sizes: list[int]) -> torch.Tensor:
    """Patches that are called by the number of their picture."""
    return torch.arange(float(len(sizes))).repeat_interleave(torch.tensor(sizes))[:, None]


def call() -> dict[str, torch.Tensor]:
    ids = tokens([3, 0, 4, 1])
    return {"input_ids": ids, "pixel_values": patches([8, 4, 16, 4]), "image_grid_thw": GRIDS, "labels": ids + 100}


@pytest.mark.parametrize("rows", [[0], [1], [0, 1], [2, 3], [1, 3], [0, 1, 2, 3]])
def test_rows_have_their_pictures(rows):
    items = find_items((), call())
    assert items is not None and (items.count, items.row_length) == (4, 12)
    _, some = items.select(rows)
    pictures = [number for number, owner in enumerate(OWNERS) if owner in rows]
    assert some["image_grid_thw"].tolist() == GRIDS[pictures].tolist()
    assert some["pixel_values"].unique_consecutive().tolist() == pictures or not pictures
    assert len(some["pixel_values"]) == int(GRIDS[pictures].prod(1).sum())
    assert some["input_ids"].equal(call()["input_ids"][rows]) and some["labels"].equal(some["input_ids"] + 100)


def test_videos_beside_pictures():
    ids = tokens([3, 0, 4, 1])
    ids[1:3, 8:10] = VIDEO  # two videos of two tokens each
    more = {"pixel_values_videos": patches([8, 8]), "video_grid_thw": torch.tensor([[2, 2, 2], [1, 4, 2]])}
    items = find_pictures((), {**call(), "input_ids": ids, **more, "seconds": torch.tensor([0.5, 0.25])})
    assert items is not None
    _, some = items.select([2, 3])
    assert some["image_grid_thw"].tolist() == GRIDS[2:].tolist() and some["video_grid_thw"].tolist() == [[1, 4, 2]]
    assert some["pixel_values_videos"].unique().tolist() == [1.0] and some["seconds"].tolist() == [0.25]


def test_an_entry_a_picture():
    """Gemma 3: of one size, here of two tokens; Pixtral: beside the size of each."""
    pictures = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 5, 5)
    items = find_pictures((tokens([4, 0, 4]), pictures), {})
    assert items is not None and items.count == 3
    (_, some), _ = items.select([1, 2])
    assert some[:, 0, 0, 0].tolist() == [2.0, 3.0]
    sizes = torch.tensor([[8, 4], [4, 4], [8, 8]])  # 2, 1 and 4 tokens of 16 pixels
    items = find_pictures((tokens([3, 4]), pictures[:3], sizes), {})
    assert items is not None
    (_, some, own), _ = items.select([1])
    assert some[:, 0, 0, 0].tolist() == [2.0] and own.tolist() == [[8, 8]]
    assert find_pictures((tokens([2, 1, 4]), pictures[:3], sizes), {}) is None, "one each: ordinary rows"


def test_rows_that_are_repeated():
    items = find_pictures((), call())
    assert items is not None
    _, some = items.select([3, 0, 3])
    assert some["image_grid_thw"].tolist() == GRIDS[[3, 0, 1, 3]].tolist()
    assert some["pixel_values"].unique_consecutive().tolist() == [3.0, 0.0, 1.0, 3.0]


@pytest.mark.parametrize(
    "given",
    [
        {"input_ids": tokens([3, 1, 3, 1])},
        {"input_ids": tokens([3, 0, 4, 1]), "image_grid_thw": GRIDS},
        {**call(), "input_ids": tokens([1, 2, 4, 1]), "labels": tokens([1, 2, 4, 1])},
        {**call(), "pixel_values": patches([8, 4, 16])},
        {"input_ids": tokens([2, 0, 3, 1]), "pixel_values": torch.zeros(3, 3, 5, 5)},
        {"input_ids": tokens([2, 0]), "mask": torch.zeros(1, 1, 12, 12)},
        {"input_ids": tokens([0, 4, 0]).roll(6, 1), "sound": torch.zeros(2, 3, 5)},
        {
            "input_ids": tokens([4, 0, 4])[:, torch.tensor([0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11])],
            "sound": torch.zeros(4, 3, 5),
        },
        {"pixel_values": torch.zeros(4, 3, 5, 5)},
    ],
    ids=[
        "no pictures",
        "no patches",
        "a row ends in a picture",
        "too few patches",
        "uneven",
        "shared by rows",
        "padding",
        "words that are there as often",
        "no rows",
    ],
)
def test_what_has_no_pictures_for_its_rows(given):
    assert find_pictures((), given) is None
