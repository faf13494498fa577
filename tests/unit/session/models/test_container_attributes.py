"""Contents of attributes that a script changes in place."""

from __future__ import annotations

import argparse
import collections
import dataclasses

import numpy as np
import torch
from torch import nn

from moreh_ap.session.models.container_attributes import Containers, SettingsObjects


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


@dataclasses.dataclass
class Part:
    gain: float = 1.0


@dataclasses.dataclass
class Config:
    part: Part
    bias: float = 0.0
    weights: list = dataclasses.field(default_factory=lambda: [1.0, 2.0])


class Configured(nn.Module):
    def __init__(self, args, config) -> None:
        super().__init__()
        self.args, self.config = args, config

    def forward(self, x):
        return x * self.args.scale * self.config.part.gain + self.config.bias + self.config.weights[0]


def test_attributes_of_objects_of_settings_are_found_where_a_forward_may_read_them():
    args, config = argparse.Namespace(scale=1.0, step=0), Config(Part())
    model = nn.Sequential(Configured(args, config), Configured(args, config))
    known = SettingsObjects(model)
    assert known.take_changes() == []
    args.step += 1  # which no forward reads
    assert known.take_changes() == []
    args.scale, config.part.gain, config.bias = 2.0, 3.0, 4.0
    config.weights[0] = 5.0
    found = [
        ("args.scale", 2.0),
        ("config.bias", 4.0),
        ("config.part.gain", 3.0),
        ("config.weights", [5.0, 2.0]),
    ]
    assert sorted(known.take_changes()) == [(path, *change) for path in "01" for change in found]
    assert known.take_changes() == []


def test_an_object_is_followed_where_modules_have_it():
    args, config = argparse.Namespace(scale=1.0), Config(Part())
    model = nn.Sequential(Configured(args, config), Configured(args, Config(config.part)))
    known = SettingsObjects(model)
    model[0].args = argparse.Namespace(scale=7.0)
    known.note("args", model[0].args)
    args.scale = 2.0
    assert known.take_changes() == [("1", "args.scale", 2.0)]
    model[0].args.scale = 3.0
    assert known.take_changes() == [("0", "args.scale", 3.0)]
    model[1].args = model[0].args
    args.scale = 4.0  # no module has it any more
    assert known.take_changes() == []
    model[0].args.scale = 5.0
    assert known.take_changes() == [("0", "args.scale", 5.0), ("1", "args.scale", 5.0)]
    config.part = Part(9.0)
    assert known.take_changes() == [("0", "config.part", Part(9.0))]
    config.part.gain = 8.0
    assert known.take_changes() == [("0", "config.part.gain", 8.0)]


def test_another_forward_may_read_other_attributes():
    args = argparse.Namespace(scale=1.0, late=1.0)
    layer = Configured(args, Config(Part()))
    known = SettingsObjects(layer)
    layer.forward = lambda x: x * args.late
    known.note("forward", layer.forward)
    known.take_changes()
    args.late = 2.0
    assert known.take_changes() == [("", "args.late", 2.0)]


def test_small_arrays_and_objects_in_containers_are_compared():
    layer = Layer()
    layer.weights, layer.parts = np.ones(3, dtype=np.float32), [Part(), Part()]
    layer.large, layer.ring = np.ones(100_000), [Part()]
    layer.ring[0].gain = layer.ring  # which has itself inside
    known = Containers({"layer": layer})
    assert ("layer", "large") not in known.known and ("layer", "ring") not in known.known
    layer.weights[0], layer.parts[1].gain = 2.0, 3.0
    found = known.take_changes()
    assert {name for _, name, _ in found} == {"weights", "parts"}
    assert known.take_changes() == []


def test_what_cannot_be_copied_is_compared_as_an_object():
    size = collections.namedtuple("size", "width height")
    ring = []
    ring.append(ring)
    args = argparse.Namespace(scale=size(1, 2), late=torch.Size([3]), bias=ring)
    layer = Configured(args, Config(Part()))
    layer.forward = lambda x: x * args.late[0] + args.scale.width + len(args.bias)
    known = SettingsObjects(layer)
    assert known.take_changes() == []
    args.scale = size(3, 4)
    assert known.take_changes() == [("", "args.scale", size(3, 4))]
