"""What the graphs of a batch are where tensors alone make one large graph.

Must not know what is computed from them.

[Note: flat graphs]
The ends of edges, a tensor of shape (2, edges) or two vectors, name nodes. Whatever counts the nodes has rows of nodes,
and so for edges and graphs. To which graph a node belongs, a vector in rising order says; without one, a graph ends
where no edge leads from the nodes before to those behind. A plain number that is the count of graphs or of nodes
(`batch_size`, `num_nodes`) becomes that of the chosen ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from moreh_ap.protocol.objects.items import INSIDE, Arguments, Items, replaced_in

_LARGEST_PART = 0.5
"""A graph with more of the nodes is no item among others: one large graph may have some nodes without edges."""


class FlatGraphs(Items):
    """Graphs in tensors; see [Note: flat graphs].

    Args:
        given: The arguments.
        batch: To which graph each node belongs.
        ends: The nodes at both ends of each edge: one tensor of shape (2, edges), or two vectors.
    """

    def __init__(self, given: Arguments, batch: Tensor, ends: Sequence[Tensor]) -> None:
        self._given, self._batch, self._ends = given, batch, ends
        self.count = int(batch[-1]) + 1

    def _select(self, chosen: Sequence[int]) -> Arguments:
        graphs = torch.tensor(list(chosen), device=self._batch.device)
        places = torch.full((self.count,), -1, device=graphs.device)
        places[graphs] = torch.arange(len(graphs), device=graphs.device)
        nodes = (places[self._batch] >= 0).nonzero()[:, 0]
        numbers = torch.full_like(self._batch, -1)
        numbers[nodes] = torch.arange(len(nodes), device=graphs.device)
        first, _ = _both(self._ends)
        kept = (numbers[first] >= 0).nonzero()[:, 0]
        of_size = {len(self._batch): nodes, len(first): kept, self.count: graphs}
        counts = {len(self._batch): len(nodes), self.count: len(graphs)}

        def choose(leaf: Any) -> Any:
            if leaf is self._batch:
                return places[leaf[nodes]]
            if any(leaf is one for one in self._ends):
                return numbers[leaf[..., kept]].to(leaf.dtype)
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] in of_size:
                return leaf[of_size[leaf.shape[0]]]
            if type(leaf) is int and leaf in counts:
                return counts[leaf]
            return leaf

        leaves, spec = tree_flatten(self._given)
        args, kwargs = tree_unflatten([choose(leaf) for leaf in leaves], spec)
        return args, kwargs


def find_graphs(given: Arguments) -> FlatGraphs | None:
    """Returns the graphs in the arguments of a call, None without."""
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    whole = [leaf for leaf in tensors if leaf.dtype == torch.int64 and leaf.numel()]
    vectors = [leaf for leaf in whole if leaf.ndim == 1 and _names_graphs(leaf)]
    pairs = [(leaf,) for leaf in whole if leaf.ndim == 2 and leaf.shape[0] == 2]
    for ends in (*pairs, *_pairs_of_vectors(given)):
        first, second = _both(ends)
        beside = [leaf for leaf in tensors if all(leaf is not one for one in ends)]
        sizes = {leaf.shape[0] for leaf in beside if leaf.ndim}
        if min(int(one.min()) for one in (first, second)) < 0:
            continue
        named = [
            one
            for one in vectors
            if any(one is leaf for leaf in beside)
            and any(leaf is not one and leaf.shape[:1] == one.shape for leaf in beside)
        ]
        count = min((size for size in sizes if size > max(int(first.max()), int(second.max()))), default=None)
        others = [leaf for leaf in beside if leaf.ndim and leaf.shape[0] not in (count, len(first))]
        if count is not None:
            named.append(_graphs_apart(first, second, count))
        for batch in named:
            are_told_apart = len({len(batch), len(first), int(batch[-1]) + 1}) == 3
            is_within = max(int(first.max()), int(second.max())) < len(batch)
            if are_told_apart and is_within and torch.equal(batch[first], batch[second]):
                largest = int(batch.bincount().max())
                is_told = any(batch is one for one in vectors)
                is_known = all(len(leaf) == int(batch[-1]) + 1 for leaf in others)
                if is_told or (is_known and largest <= _LARGEST_PART * len(batch)):
                    return FlatGraphs(given, batch, ends)
    return None


def _both(ends: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    first, second = ends if len(ends) == 2 else ends[0]
    return first, second


def _pairs_of_vectors(given: Arguments) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields lists and tuples of two vectors of equal length that may name nodes."""
    found: list[tuple[Tensor, Tensor]] = []

    def look(value: Any) -> Any:
        are_two = type(value) in (list, tuple) and len(value) == 2 and all(isinstance(one, Tensor) for one in value)
        if are_two and all(one.ndim == 1 and one.dtype == torch.int64 and one.numel() for one in value):
            found.extend([tuple(value)] if len(value[0]) == len(value[1]) else [])
        return INSIDE

    replaced_in(look, given)
    yield from found


def _names_graphs(vector: Tensor) -> bool:
    steps = vector.diff()
    return int(vector[0]) == 0 and bool(((steps == 0) | (steps == 1)).all())


def _graphs_apart(first: Tensor, second: Tensor, nodes: int) -> Tensor:
    """Returns to which graph each node belongs, as edges tell.

    Example:
        >>> _graphs_apart(torch.tensor([0, 3]), torch.tensor([1, 4]), 5).tolist()
        [0, 0, 1, 2, 2]
    """
    places = torch.arange(nodes, device=first.device)
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    farthest = places.scatter_reduce(0, low, high, "amax").cummax(0).values
    begins = torch.ones_like(places)
    begins[1:] = farthest[:-1] < places[1:]
    return begins.cumsum(0) - 1
