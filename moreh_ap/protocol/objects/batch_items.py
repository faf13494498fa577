"""What the items of a batch are where no tensor has a row for each: lists of tensors or dicts, graphs.

Decides how many items the arguments of a call have, and which arguments some of them make. Must not know what is
computed from them.

[Note: graphs]
A batch of graphs is one large graph whose parts are not connected. An object of PyTorch Geometric is taken apart and
put together by the library. What tensors alone are one, `flat_graphs.py` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from moreh_ap.protocol.objects.flat_graphs import find_graphs
from moreh_ap.protocol.objects.flat_items import find_bags, find_packed, find_tables
from moreh_ap.protocol.objects.items import INSIDE, Arguments, Items, has_rows, replaced_in
from moreh_ap.protocol.objects.named_items import find_named
from moreh_ap.protocol.objects.picture_rows import find_pictures
from moreh_ap.protocol.passed_state import PASSED_STATE


def find_items(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Items | None:
    """Returns the items of a batch, None where it is not known to have any; state that is passed along has none."""
    beside = {name: value for name, value in kwargs.items() if name == PASSED_STATE}
    given = tuple(args), {name: value for name, value in kwargs.items() if name not in beside}
    found: Items | None = _graph_objects(given) or find_packed(given) or find_tables(given)
    found = (
        found or find_pictures(*given) or _listed(given) or find_graphs(given) or find_bags(given) or find_named(given)
    )
    if found is not None:
        found.beside = beside
    return found


class ListedItems(Items):
    """Lists, tuples and tensors with an entry for each item, wherever they nest."""

    def __init__(self, given: Arguments, count: int) -> None:
        self._given, self.count = given, count

    def _select(self, chosen: Sequence[int]) -> Arguments:
        def choose(value: Any) -> Any:
            if type(value) in (list, tuple) and len(value) == self.count:
                return type(value)(value[one] for one in chosen)
            if has_rows(value, self.count):
                return value[torch.tensor(list(chosen), device=value.device)]
            return INSIDE

        return replaced_in(choose, self._given)

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
            if has_rows(value, self.count):
                return value[torch.tensor(list(chosen), device=value.device)]
            return INSIDE

        return replaced_in(choose, self._given)


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
        return INSIDE

    replaced_in(look, given)
    if not counts or (beside and not any(has_rows(tensor, counts[0]) for tensor in beside)):
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
            return INSIDE
        found.append(value)
        return value

    replaced_in(look, given)
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
