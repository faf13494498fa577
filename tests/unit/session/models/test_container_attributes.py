"""Contents of attributes that a script changes in place."""

from __future__ import annotations

import collections

import torch
from torch import nn

from moreh_ap.session.models.container_attributes import Containers


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.merged, self.scaling, self.names, self.tensors = [], {"first": 1.0}, {"a"}, [torch.ones(2)]
        self.nested = collections.defaultdict(list, x=[torch.ones(1)])

    def forward(self, x):
        return x


def test_changes_in_place_are_found_once():
    layer = Layer()
    known = Containers({"layer": layer})
    assert known.take_changes() == []
    layer.merged.append("first")
    layer.scaling["first"] = 2.0
    layer.names.add("b")
    layer.tensors[0].add_(1)  # the value of a tensor is not looked at
    found = known.take_changes()
    assert found == [
        ("layer", "merged", ["first"]),
        ("layer", "scaling", {"first": 2.0}),
        ("layer", "names", {"a", "b"}),
    ]
    assert known.take_changes() == []
    layer.merged.pop()
    layer.tensors.append(torch.ones(3))
    layer.nested["x"][0] = layer.tensors[1]
    assert known.take_changes() == [
        ("layer", "merged", []),
        ("layer", "tensors", layer.tensors),
        ("layer", "nested", layer.nested),
    ]
    assert known.take_changes() == []


def test_contents_of_attributes_that_come_later_are_followed_and_those_that_are_not_plain_are_left_alone():
    layer = Layer()
    known = Containers({"": layer})
    layer.more = [[1, 2], {"x": (3, 4)}]
    known.note("", layer, "more", layer.more)
    layer.more[1]["x"] = (3, 5)
    assert known.take_changes() == [("", "more", [[1, 2], {"x": (3, 5)}])]
    layer.scaling["first"] = object()
    assert known.take_changes() == []
    layer.scaling["first"] = 5.0
    assert known.take_changes() == []


def test_a_container_that_modules_share_is_set_for_all_of_them():
    first, second = Layer(), Layer()
    second.tensors = first.tensors
    known = Containers({"first": first, "second": second})
    known.set("first", first, "tensors", [torch.zeros(2)], in_place=True)
    assert second.tensors is first.tensors and known.take_changes() == []
