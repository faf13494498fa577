"""What the items of a batch are where no tensor has a row for each: lists of tensors or dicts, and graphs.

Decides how many items the arguments of a call have, and which arguments some of them make. Must not know what is
computed from them.

[Note: graphs]
A batch of graphs is one large graph whose parts are not connected. An object of PyTorch Geometric is taken apart and
put together by the library. Tensors alone are one if a vector says to which graph each node belongs, in rising order,
and a tensor of shape (2, edges) names nodes: whatever counts the nodes has rows of nodes, and so for edges and graphs.
A plain number that is the count of graphs or of nodes (`batch_size`, `num_nodes`) becomes that of the chosen ones.

[Note: bags]
Sequences of unequal length may lie one behind the other in one tensor, beside a vector that says where each begins, in
rising order from 0 (the offsets of `nn.EmbeddingBag`), with the end of the last one behind them or not. Whatever has
as many entries as all sequences together has an entry for each of theirs.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from moreh_ap.protocol.passed_state import PASSED_STATE

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Items(ABC):
    """The items in the arguments of one call.

    Attributes:
        count: How many there are.
    """

    count: int
    _beside: Mapping[str, Any] = {}

    def select(self, chosen: Sequence[int]) -> Arguments:
        """Returns the arguments with the chosen items, given in rising order, alone."""
        args, kwargs = self._select(chosen)
        return args, {**kwargs, **self._beside}

    @abstractmethod
    def _select(self, chosen: Sequence[int]) -> Arguments: ...

    def differing_sizes(self) -> tuple[Any, ...]:
        """Returns for each tensor of an item in which dims the items differ; () where they differ by nature."""
        return ()


def find_items(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Items | None:
    """Returns the items of a batch, None where it is not known to have any; state that is passed along has none."""
    beside = {name: value for name, value in kwargs.items() if name == PASSED_STATE}
    given = tuple(args), {name: value for name, value in kwargs.items() if name not in beside}
    found = _graph_objects(given) or _listed(given) or _flat_graphs(given) or _bags(given)
    if found is not None:
        found._beside = beside
    return found


class ListedItems(Items):
    """Lists, tuples and tensors with an entry for each item, wherever they nest."""

    def __init__(self, given: Arguments, count: int) -> None:
        self._given, self.count = given, count

    def _select(self, chosen: Sequence[int]) -> Arguments:
        def choose(value: Any) -> Any:
            if type(value) in (list, tuple) and len(value) == self.count:
                return type(value)(value[one] for one in chosen)
            if _has_rows(value, self.count):
                return value[torch.tensor(list(chosen), device=value.device)]
            return _INSIDE

        args, kwargs = self._given
        chosen_args = tuple(_replaced(choose, one) for one in args)
        return chosen_args, {name: _replaced(choose, one) for name, one in kwargs.items()}

    def differing_sizes(self) -> tuple[Any, ...]:
        shapes = []
        for item in range(self.count):
            leaves = tree_leaves(self.select([item]))
            shapes.append([leaf.shape for leaf in leaves if isinstance(leaf, Tensor)])
        if len({tuple(map(len, one)) for one in shapes}) > 1:
            return ((True,),)
        return tuple(tuple(len(set(sizes)) > 1 for sizes in zip(*alike, strict=True)) for alike in zip(*shapes))


class GraphObjects(Items):
    """A batch object of PyTorch Geometric, and tensors with a row for each graph beside it."""

    def __init__(self, given: Arguments, count: int) -> None:
        self._given, self.count = given, count

    def _select(self, chosen: Sequence[int]) -> Arguments:
        def choose(value: Any) -> Any:
            if _is_graph_batch(value):
                return _joined(value, [value.get_example(one) for one in chosen])
            if type(value) is int and value == self.count:
                return len(chosen)
            if _has_rows(value, self.count):
                return value[torch.tensor(list(chosen), device=value.device)]
            return _INSIDE

        args, kwargs = self._given
        chosen_args = tuple(_replaced(choose, one) for one in args)
        return chosen_args, {name: _replaced(choose, one) for name, one in kwargs.items()}


class FlatGraphs(Items):
    """Graphs in tensors; see [Note: graphs].

    Args:
        given: The arguments.
        batch: To which graph each node belongs.
        edges: The nodes at both ends of each edge.
    """

    def __init__(self, given: Arguments, batch: Tensor, edges: Tensor) -> None:
        self._given, self._batch, self._edges = given, batch, edges
        self.count = int(batch[-1]) + 1

    def _select(self, chosen: Sequence[int]) -> Arguments:
        graphs = torch.tensor(list(chosen), device=self._batch.device)
        places = torch.full((self.count,), -1, device=graphs.device)
        places[graphs] = torch.arange(len(graphs), device=graphs.device)
        nodes = (places[self._batch] >= 0).nonzero()[:, 0]
        numbers = torch.full_like(self._batch, -1)
        numbers[nodes] = torch.arange(len(nodes), device=graphs.device)
        kept = (numbers[self._edges[0]] >= 0).nonzero()[:, 0]
        of_size = {len(self._batch): nodes, self._edges.shape[1]: kept, self.count: graphs}
        counts = {len(self._batch): len(nodes), self.count: len(graphs)}

        def choose(leaf: Any) -> Any:
            if leaf is self._batch:
                return places[leaf[nodes]]
            if leaf is self._edges:
                return numbers[leaf[:, kept]]
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] in of_size:
                return leaf[of_size[leaf.shape[0]]]
            if type(leaf) is int and leaf in counts:
                return counts[leaf]
            return leaf

        leaves, spec = tree_flatten(self._given)
        args, kwargs = tree_unflatten([choose(leaf) for leaf in leaves], spec)
        return args, kwargs


class Bags(Items):
    """Sequences one behind the other; see [Note: bags].

    Args:
        given: The arguments.
        offsets: Where each begins; has the end of the last one, too, if it is `ended`.
        total: Entries of all sequences together.
    """

    def __init__(self, given: Arguments, offsets: Tensor, total: int, *, ended: bool) -> None:
        self._given, self._offsets, self._total, self._ended = given, offsets, total, ended
        self.count = len(offsets) - ended
        self._ends = offsets[1:] if ended else torch.cat([offsets[1:], offsets.new_tensor([total])])

    def _select(self, chosen: Sequence[int]) -> Arguments:
        bags = torch.tensor(list(chosen), device=self._offsets.device)
        starts, lengths = self._offsets[bags], self._ends[bags] - self._offsets[bags]
        ends = lengths.cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends if self._ended else ends[:-1]]).to(self._offsets.dtype)
        within = torch.arange(int(ends[-1]), device=bags.device) - (ends - lengths).repeat_interleave(lengths)
        of_size = {self._total: starts.repeat_interleave(lengths) + within, self.count: bags}

        def choose(leaf: Any) -> Any:
            if leaf is self._offsets:
                return offsets
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] in of_size:
                return leaf[of_size[leaf.shape[0]]]
            return leaf

        leaves, spec = tree_flatten(self._given)
        args, kwargs = tree_unflatten([choose(leaf) for leaf in leaves], spec)
        return args, kwargs


_INSIDE = object()
"""What a choice says of a value that is kept, but for what it finds inside."""


def _replaced(choose: Callable[[Any], Any], value: Any) -> Any:
    """Returns a value with what `choose` gives in place of the outermost parts that it knows."""
    found = choose(value)
    if found is not _INSIDE:
        return found
    if type(value) in (list, tuple):
        return type(value)(_replaced(choose, one) for one in value)
    if isinstance(value, tuple) and type(value).__bases__ == (tuple,) and not isinstance(value, torch.Size):
        return type(value)(*(_replaced(choose, one) for one in value))
    if type(value) is dict:
        return {key: _replaced(choose, one) for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        other = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(other, field.name, _replaced(choose, getattr(value, field.name)))
        return other
    return value


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == count


def _listed(given: Arguments) -> ListedItems | None:
    """Returns the items of the first list of tensors; None where tensors are beside it and none has a row for each,
    as where a recurrent network is given a sequence and the pair of its hidden states."""
    counts: list[int] = []
    beside: list[Tensor] = []

    def look(value: Any) -> Any:
        is_list = type(value) in (list, tuple) and len(value) > 0
        if is_list and all(any(isinstance(leaf, Tensor) for leaf in tree_leaves(one)) for one in value):
            counts.append(len(value))
            return value
        if isinstance(value, Tensor) and value.ndim > 0:
            beside.append(value)
        return _INSIDE

    args, kwargs = given
    for one in (*args, *kwargs.values()):
        _replaced(look, one)
    if not counts or (beside and not any(_has_rows(tensor, counts[0]) for tensor in beside)):
        return None
    return ListedItems(given, counts[0])


def _is_graph_batch(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("num_graphs", "get_example")) and hasattr(
        type(value), "from_data_list"
    )


def _joined(batch: Any, graphs: list[Any]) -> Any:
    """Returns some graphs of a batch as a batch that has the same attributes."""
    kind: Any = next(one for one in type(batch).__mro__ if "from_data_list" in vars(one))
    follows = [name.removesuffix("_batch") for name in batch.to_dict() if str(name).endswith("_batch")]
    return kind.from_data_list(graphs, follow_batch=follows)


def _graph_objects(given: Arguments) -> GraphObjects | None:
    found: list[Any] = []

    def look(value: Any) -> Any:
        if isinstance(value, Tensor) or not _is_graph_batch(value):
            return _INSIDE
        found.append(value)
        return value

    args, kwargs = given
    for one in (*args, *kwargs.values()):
        _replaced(look, one)
    if len(found) != 1 or "ptr" not in found[0] or found[0].num_graphs != len(found[0].ptr) - 1:
        return None
    (batch,) = found
    again = _joined(batch, [batch.get_example(one) for one in range(batch.num_graphs)])
    return GraphObjects(given, batch.num_graphs) if _equal(batch.to_dict(), again.to_dict()) else None


def _equal(left: Any, right: Any) -> bool:
    (lefts, spec), (rights, other) = tree_flatten(left), tree_flatten(right)
    if spec != other:
        return False
    return all(
        torch.equal(one, two) if isinstance(one, Tensor) and isinstance(two, Tensor) else one is two or one == two
        for one, two in zip(lefts, rights, strict=True)
    )


def _flat_graphs(given: Arguments) -> FlatGraphs | None:
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    whole = [leaf for leaf in tensors if leaf.dtype == torch.int64 and leaf.layout is torch.strided and leaf.numel()]
    vectors = [leaf for leaf in whole if leaf.ndim == 1 and _names_graphs(leaf)]
    pairs = [leaf for leaf in whole if leaf.ndim == 2 and leaf.shape[0] == 2]
    for batch in vectors:
        counts_nodes = any(leaf is not batch and leaf.ndim and leaf.shape[0] == len(batch) for leaf in tensors)
        for edges in pairs if counts_nodes else ():
            sizes = {len(batch), edges.shape[1], int(batch[-1]) + 1}
            is_within = len(sizes) == 3 and edges.min() >= 0 and edges.max() < len(batch)
            if is_within and torch.equal(batch[edges[0]], batch[edges[1]]):
                return FlatGraphs(given, batch, edges)
    return None


def _names_graphs(vector: Tensor) -> bool:
    steps = vector.diff()
    return int(vector[0]) == 0 and bool(((steps == 0) | (steps == 1)).all())


def _bags(given: Arguments) -> Bags | None:
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    vectors = [leaf for leaf in tensors if leaf.ndim == 1 and leaf.dtype in (torch.int64, torch.int32)]
    for offsets in (leaf for leaf in vectors if len(leaf) > 1 and _rises_from_0(leaf)):
        for entries in vectors:
            total, last = len(entries), int(offsets[-1])
            if total >= last and total not in (len(offsets), len(offsets) - (total == last)):
                return Bags(given, offsets, total, ended=total == last)
    return None


def _rises_from_0(vector: Tensor) -> bool:
    return int(vector[0]) == 0 < int(vector[-1]) and bool((vector.diff() >= 0).all())
