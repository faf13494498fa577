"""Graphs in tensors alone, with and without a vector that says to which graph a node belongs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moreh_ap.protocol.objects.flat_graphs import find_graphs


def triangles(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes and edges of as many triangles, the nodes numbered one triangle after the other, and a label each."""
    begins = 3 * torch.arange(count)[:, None]
    first, second = begins + torch.tensor([0, 1, 2, 0]), begins + torch.tensor([1, 2, 0, 2])
    return torch.arange(3.0 * count)[:, None], torch.stack([first.flatten(), second.flatten()]), torch.arange(count)


@pytest.mark.parametrize("is_pair", [False, True])
def test_graphs_end_where_no_edge_leads_on(is_pair):
    nodes, edges, labels = triangles(4)
    found = find_graphs(((nodes, list(edges) if is_pair else edges), {"labels": labels}))
    assert found is not None and found.count == 4
    (some, ends), kwargs = found.select([1, 3])
    assert some[:, 0].tolist() == [3, 4, 5, 9, 10, 11] and kwargs["labels"].tolist() == [1, 3]
    assert [one.tolist() for one in ends] == [[0, 1, 2, 0, 3, 4, 5, 3], [1, 2, 0, 2, 4, 5, 3, 5]]


def test_rows_of_edges_and_a_number_of_nodes_go_with_the_graphs():
    nodes, edges, _ = triangles(3)
    found = find_graphs(((nodes, edges, torch.arange(12)[:, None]), {"num_nodes": 9}))
    assert found is not None
    (_, _, of_edges), kwargs = found.select([2])
    assert of_edges[:, 0].tolist() == [8, 9, 10, 11] and kwargs == {"num_nodes": 3}


def test_a_node_without_edges_is_a_graph():
    found = find_graphs(((torch.rand(5, 2), torch.tensor([[0, 3, 4, 1], [1, 4, 3, 0]])), {}))
    assert found is not None and found.count == 3


def test_one_large_graph_among_single_nodes_is_no_item():
    nodes, edges = torch.rand(8, 2), torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
    assert find_graphs(((nodes, edges), {})) is None


def test_another_tensor_that_may_name_nodes_leaves_the_graphs_together():
    nodes, edges, _ = triangles(4)
    assert find_graphs(((nodes, edges, torch.tensor([11, 0])), {})) is None
