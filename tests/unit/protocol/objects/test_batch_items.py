"""What the items of a batch are, and arguments with some of them alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moreh_ap.protocol.objects.batch_items import find_items
from moreh_ap.protocol.passed_state import PASSED_STATE


@dataclass
class Sample:
    pictures: list[Tensor]
    classes: Tensor
    title: str


def test_lists_of_pictures_and_targets_have_an_item_each():
    pictures = [torch.full((3, 4 + number, 5), float(number)) for number in range(4)]
    targets = [{"boxes": torch.full((number, 4), float(number))} for number in range(4)]
    items = find_items((pictures, targets), {"scale": 2.0})
    assert items is not None and items.count == 4
    (some, of_some), kwargs = items.select([1, 3])
    assert [int(one[0, 0, 0]) for one in some] == [1, 3] and [len(one["boxes"]) for one in of_some] == [1, 3]
    assert kwargs == {"scale": 2.0}
    assert items.differing_sizes() == ((False, True, False), (True, False))


def test_tensors_and_dataclasses_beside_lists_are_cut_with_them():
    sample = Sample([torch.zeros(2), torch.zeros(3), torch.zeros(4)], torch.tensor([5, 6, 7]), "three")
    items = find_items((), {"sample": sample, PASSED_STATE: {"kept": [torch.zeros(1)] * 3}})
    assert items is not None
    _, kwargs = items.select([0, 2])
    assert kwargs["sample"].classes.tolist() == [5, 7] and [len(one) for one in kwargs["sample"].pictures] == [2, 4]
    assert kwargs["sample"].title == "three" and len(sample.pictures) == 3
    assert len(kwargs[PASSED_STATE]["kept"]) == 3, "what earlier forwards left is no part of the batch"


def test_a_pair_of_hidden_states_beside_a_sequence_is_no_list_of_items():
    hidden = torch.zeros(1, 2, 4), torch.ones(1, 2, 4)
    assert find_items((torch.randn(1, 5, 3), hidden), {}) is None
    assert find_items((hidden,), {}) is not None


def graphs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = torch.tensor([0, 0, 1, 1, 1, 2])
    edges = torch.tensor([[0, 1, 2, 4, 3, 5, 2, 3], [1, 0, 4, 2, 3, 5, 3, 3]])
    return torch.arange(6.0)[:, None], edges, batch, torch.tensor([7.0, 8.0, 9.0])


def test_flat_graphs_are_cut_by_the_graph_of_each_node():
    items = find_items(graphs(), {})
    assert items is not None and items.count == 3
    (x, edges, batch, y), _ = items.select([1, 2])
    assert x[:, 0].tolist() == [2, 3, 4, 5] and batch.tolist() == [0, 0, 0, 1] and y.tolist() == [8, 9]
    assert edges.tolist() == [[0, 2, 1, 3, 0, 1], [2, 0, 1, 3, 1, 1]]


def test_counts_of_graphs_and_of_nodes_become_those_of_the_chosen_ones():
    items = find_items(graphs(), {"batch_size": 3, "num_nodes": 6, "scale": 2, "mean": 3.0, "is_directed": True})
    assert items is not None
    _, kwargs = items.select([1])
    assert kwargs == {"batch_size": 1, "num_nodes": 3, "scale": 2, "mean": 3.0, "is_directed": True}


def test_graphs_with_an_edge_between_them_are_no_items():
    x, edges, batch, y = graphs()
    edges[0, 0] = 5
    assert find_items((x, edges, batch, y), {}) is None


def test_ordinary_tensors_have_no_items():
    assert find_items((torch.randn(4, 3),), {"labels": torch.arange(4)}) is None


def test_a_sparse_matrix_has_no_items():
    """The adjacency of one graph beside the features of its nodes, in either order."""
    features, edges = torch.rand(5, 3), torch.eye(5).to_sparse()
    assert find_items((), {"features": features, "edges": edges}) is None
    for given in ([features, edges], (edges, features)):
        items = find_items((given,), {"edges": edges})
        assert items is None or items.select([0])[1]["edges"] is edges


@pytest.mark.parametrize("is_ended", [False, True])
def test_bags_are_cut_by_their_offsets(is_ended):
    words, weights, dense = torch.arange(10, 17), torch.rand(7), torch.arange(4)[:, None]
    offsets = torch.tensor([0, 2, 2, 5, 7] if is_ended else [0, 2, 2, 5])
    items = find_items((words, offsets), {"weights": weights, "dense": dense, "scale": 7})
    assert items is not None and items.count == 4
    (some, begins), kwargs = items.select([0, 1, 3])
    assert some.tolist() == [10, 11, 15, 16] and begins.tolist() == ([0, 2, 2, 4] if is_ended else [0, 2, 2])
    assert torch.equal(kwargs["weights"], weights[[0, 1, 5, 6]]) and kwargs["scale"] == 7
    assert kwargs["dense"][:, 0].tolist() == [0, 1, 3]


@pytest.mark.parametrize("offsets", [[0, 3, 2], [1, 2, 3], [0, 2, 9], [0, 0, 0], [0.0, 1.0, 2.0]])
def test_what_only_looks_like_offsets_has_no_items(offsets):
    assert find_items((torch.arange(7), torch.tensor(offsets)), {}) is None
