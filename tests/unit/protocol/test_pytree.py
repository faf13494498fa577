"""Objects with tensors inside: taken apart and put together again, or refused."""

from __future__ import annotations

import pickle
import sys
import threading
import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from moreh_ap.errors import UnsupportedError
from moreh_ap.protocol import pytree as pytree_module
from moreh_ap.protocol.pytree import flatten, nest_alike, pickle_for_others, pickle_treespec, unpickle_treespec


class Batch:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Point:
    __slots__ = ("x", "y")


@dataclass
class Ring:
    x: torch.Tensor
    following: Any


class Fields(dict[str, Any]):
    name = ""


class Rows(list[Any]):
    pass


def again(value: Any) -> Any:
    leaves, treespec = flatten(value)
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) > 0
    assert not any(isinstance(leaf, (Batch, Point, Fields, Rows)) for leaf in leaves)
    return tree_unflatten(leaves, unpickle_treespec(pickle_treespec(treespec)))


def test_a_distribution_is_the_same_afterwards():
    normal, choice = again((Independent(Normal(torch.zeros(3, 2), torch.ones(2)), 1), Categorical(torch.ones(3, 4))))
    assert normal.log_prob(torch.zeros(3, 2)).shape == (3,)
    assert torch.equal(choice.probs, torch.full((3, 4), 0.25))


def test_objects_nest():
    point, fields = Point(), Fields(a=torch.ones(2), b=Rows([torch.zeros(1), 7]))
    point.x, point.y = torch.ones(3), "y"
    fields.name = "fields"
    made = again([Batch(point=point, fields=fields, inner=Batch(z=torch.ones(4)), size=8)])[0]
    assert made.size == 8 and made.point.y == "y" and made.point.x.shape == (3,) and made.inner.z.shape == (4,)
    assert type(made.fields) is Fields and made.fields.name == "fields" and type(made.fields["b"]) is Rows
    assert made.fields["b"][1] == 7


def test_an_object_that_leads_back_to_itself_is_one_afterwards() -> None:
    shared = torch.ones(3)
    graph = Batch(x=shared, size=4)
    graph.storage = Batch(owner=graph, x=shared, inner={"y": torch.zeros(2)})
    leaves, treespec = flatten([graph, 5])
    assert sorted(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)) == [2, 3]
    assert treespec == flatten([graph, 5])[1]
    made = again([graph, 5])[0]
    assert made is not graph and made.storage.owner is made and made.size == 4
    assert made.x is made.storage.x and torch.equal(made.x, shared)
    assert torch.equal(made.storage.inner["y"], torch.zeros(2))


def test_another_process_takes_such_an_object_apart_likewise() -> None:
    graph = Batch(x=torch.ones(3))
    graph.self = graph
    leaves, treespec = flatten(graph)
    data = pickle_treespec(treespec)
    pytree_module._remove_added()  # as in a process that has not met the class
    made = tree_unflatten(leaves, unpickle_treespec(data))
    assert len(tree_leaves(made)) == 1 and tree_leaves(made)[0] is leaves[0]


def test_a_circle_through_objects_of_two_classes_and_a_dataclass() -> None:
    point, ring = Point(), Ring(torch.ones(2), None)
    point.x, point.y = torch.zeros(1), Fields(ring=ring)
    ring.following = point
    made = again((ring, torch.ones(1)))[0]
    assert made.following.y["ring"] is made and made.following.x.shape == (1,) and torch.equal(made.x, torch.ones(2))


def test_lists_and_dicts_of_parameters_nest_and_keep_the_graphs_of_tensors_in_them() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(3))
    leaves, treespec = flatten((nn.ParameterList([first, second]), nn.ParameterDict({"scale": first})))
    assert [id(leaf) for leaf in leaves] == [id(first), id(second), id(first)]
    computed = [leaf * 2 for leaf in leaves]
    values, named = tree_unflatten(computed, treespec)
    assert isinstance(values, nn.ParameterList) and isinstance(named, nn.ParameterDict)
    assert [*values, values[-1], *values[1:], named["scale"]] == [*computed[:2], *[computed[1]] * 2, computed[2]]
    assert len(list(values.parameters())) == 2 and dict(named.items()).keys() == {"scale"}
    assert flatten((values, named))[0][0] is computed[0]


def test_named_tuples_that_a_forward_defines_nest_alike() -> None:
    def spec(name: str, *fields: str) -> TreeSpec:
        return flatten(namedtuple(name, fields)(*(torch.ones(2) for _ in fields)))[1]  # type: ignore[misc]

    assert nest_alike(spec("Outputs", "early", "late"), spec("Outputs", "early", "late"))
    assert not nest_alike(spec("Outputs", "early", "late"), spec("Outputs", "early", "last"))
    assert not nest_alike(spec("Outputs", "early"), spec("Inputs", "early"))
    assert not nest_alike(spec("Outputs", "early"), flatten((torch.ones(2),))[1])


def test_results_nest_alike_but_for_the_rows_they_say_they_have() -> None:
    def spec(size: list[int], name: str = "x") -> Any:
        return TreeSpec(dict, {"size": torch.Size(size), "name": name}, [])

    assert nest_alike(spec([4, 2]), spec([1, 2])) and nest_alike(spec([]), spec([]))
    assert not nest_alike(spec([4, 2]), spec([4, 3])) and not nest_alike(spec([4]), spec([4], "y"))


def test_what_cannot_be_taken_apart_is_refused():
    circle: list[Any] = [torch.ones(1)]
    circle.append(circle)
    with pytest.raises(UnsupportedError, match="A Linear with tensors inside"):
        flatten([nn.Linear(2, 2)])
    locked = nn.Linear(2, 2)
    locked.lock = threading.Lock()
    with pytest.raises(UnsupportedError, match="A Linear with tensors inside"):
        flatten([locked])
    with pytest.raises(UnsupportedError, match="leads back to itself"):
        flatten([circle])
    owner = Batch(tensor=torch.ones(1), module=nn.Linear(2, 2))
    owner.self = owner
    with pytest.raises(UnsupportedError, match="with a module inside that leads back to itself"):
        flatten([owner])
    tensor = torch.ones(1)
    with pytest.raises(UnsupportedError, match="A function with tensors inside"):
        flatten([lambda: tensor])


def test_a_nesting_that_is_known_leaves_pythons_record_of_shown_warnings_alone() -> None:
    data = pickle_treespec(flatten({"loss": torch.zeros(())})[1])
    known, shown = unpickle_treespec(data), []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda *given, **more: shown.append(given)
        for _ in range(3):
            assert unpickle_treespec(data) is known
            warnings.warn("of a loop", UserWarning, stacklevel=1)
    assert len(shown) == 1


class Choice:
    """A class of the script: no tensor is in its objects."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


def test_objects_of_the_script_are_sent_with_their_class(monkeypatch):
    monkeypatch.setattr(Choice, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Choice", Choice, raising=False)
    sent = pickle_for_others([Choice(2.0), None])
    monkeypatch.delattr(sys.modules["__main__"], "Choice")  # as in a worker
    (found, nothing) = pickle.loads(sent)
    assert found.scale == 2.0 and nothing is None


def test_a_worker_sends_classes_of_the_script_back(monkeypatch):
    monkeypatch.setattr(Choice, "__module__", "__main__")  # and its `__main__` does not have it
    (found,) = pickle.loads(pickle_for_others([Choice(2.0)]))
    assert type(found) is Choice and found.scale == 2.0


def test_what_has_a_name_is_sent_by_it():
    assert pickle_for_others([1, "a", None]) == pickle.dumps([1, "a", None])
    treespec = flatten({"loss": torch.zeros(()), "logits": (torch.zeros(2), None)})[1]
    assert pickle_treespec(treespec) == pickle.dumps(treespec)
