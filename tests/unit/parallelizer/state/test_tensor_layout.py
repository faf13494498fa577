"""Layouts: local elements and whole elements are the same elements."""

from __future__ import annotations

from itertools import product

import pytest

from moreh_ap.parallelizer.state.tensor_layout import TensorLayout, shard_range, shifted

LAYOUTS = [
    TensorLayout((6, 4), 0, ((2, 4),)),
    TensorLayout((9, 4), 0, ((0, 1), (3, 4), (6, 8))),
    TensorLayout((4, 9), 1, ((1, 2), (4, 6))),
    TensorLayout((2, 3, 8), 2, ((4, 8),)),
    TensorLayout((7,), 0, ((5, 7),)),
]


def _whole_index(layout: TensorLayout, local: tuple[int, ...]) -> tuple[int, ...]:
    held = [i for start, stop in layout.ranges for i in range(start, stop)]
    return (*local[: layout.dim], held[local[layout.dim]], *local[layout.dim + 1 :])


def _indices(slices: tuple[slice, ...]) -> list[tuple[int, ...]]:
    return list(product(*(range(s.start, s.stop) for s in slices)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pieces_of_any_rows_are_the_right_elements(layout: TensorLayout) -> None:
    for start in range(layout.local_shape[0] + 1):
        for stop in range(start, layout.local_shape[0] + 1):
            mapped = {}
            for whole, local in layout.pieces(range(start, stop)):
                for there, here in zip(_indices(whole), _indices(local), strict=True):
                    assert here not in mapped
                    mapped[here] = there
            shape = (stop - start, *layout.local_shape[1:])
            expected = {
                here: _whole_index(layout, (here[0] + start, *here[1:])) for here in product(*map(range, shape))
            }
            assert mapped == expected


def test_all_rows_by_default() -> None:
    layout = LAYOUTS[1]
    assert layout.local_shape == (4, 4)
    assert layout.pieces() == layout.pieces(range(4))


@pytest.mark.parametrize(("size", "degree"), [(8, 2), (101, 2), (101, 4), (5, 4), (3, 8)])
def test_parts_cover_everything_once(size: int, degree: int) -> None:
    parts = [shard_range(size, degree, rank) for rank in range(degree)]
    assert [i for start, stop in parts for i in range(start, stop)] == list(range(size))
    assert {stop - start for start, stop in parts[:-1] if stop < size} <= {-(-size // degree)}


def test_shifted() -> None:
    assert shifted([(0, 2), (5, 6)], 10) == ((10, 12), (15, 16))
