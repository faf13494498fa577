"""Module trees as they travel to workers: what PyTorch itself would not pickle."""

from __future__ import annotations

import sys
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend
from torch.nn.utils import parametrizations, parametrize

from moreh_ap.errors import UnsupportedError
from moreh_ap.protocol.skeleton import pickle_attribute, pickle_skeleton, unpickle_attribute, unpickle_skeleton


def test_a_parametrized_module_arrives_with_its_parametrizations():
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    model = nn.Sequential(parametrizations.weight_norm(first), parametrizations.spectral_norm(second))
    copy = unpickle_skeleton(pickle_skeleton(model), torch.device("cpu"))
    assert [name for name, _ in copy.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(parameter.is_meta for parameter in copy.parameters())
    copy.to_empty(device="cpu").load_state_dict(model.state_dict())
    x = torch.ones(2, 3)
    assert torch.equal(copy.eval()(x), model.eval()(x))
    parametrize.remove_parametrizations(copy[0], "weight")
    assert type(copy[0]) is nn.Linear and torch.equal(copy(x), model(x))


def test_a_hook_that_a_library_made_reads_the_variables_of_the_library(monkeypatch):
    """As transformers' hooks that collect hidden states: what collects them is a context variable of its module."""
    library = types.ModuleType("library_with_hooks")
    code = """
from contextvars import ContextVar
COLLECTED = ContextVar("collected", default=None)
def install(module, scale):
    def hook(module, args, output):
        COLLECTED.get().append(scale)
        return output * scale
    hook.label = "scaled"
    module.register_forward_hook(hook)
"""
    exec(code, vars(library))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    library.__file__ = torch.__file__  # beside PyTorch, where libraries are installed
    model = nn.Linear(3, 2, bias=False)
    library.install(model, 3.0)
    copy = unpickle_skeleton(pickle_skeleton(model), torch.device("cpu")).to_empty(device="cpu")
    copy.load_state_dict(model.state_dict())
    collected = []
    library.COLLECTED.set(collected)
    assert torch.equal(copy(torch.ones(1, 3)), model(torch.ones(1, 3)))
    assert collected == [3.0, 3.0]
    assert [hook.label for hook in copy._forward_hooks.values()] == ["scaled"]


def test_what_a_module_defines_in_the_script_alone_is_refused_where_it_is_used(monkeypatch):
    """As where a library defines a kernel only if `torch.cuda.is_available()`, which holds in the script alone."""
    library = types.ModuleType("library_with_kernels")
    exec("def kernel(x):\n    return x", vars(library))
    library.kernel.__module__ = library.__name__
    monkeypatch.setitem(sys.modules, library.__name__, library)
    model = nn.Linear(3, 2)
    model.kernel = library.kernel
    skeleton = pickle_skeleton(model)
    del library.kernel
    copy = unpickle_skeleton(skeleton, torch.device("cpu"))
    assert copy.to_empty(device="cpu")(torch.ones(1, 3)).shape == (1, 2)
    with pytest.raises(UnsupportedError, match="forward uses kernel of library_with_kernels"):
        copy.kernel(torch.ones(1))


class Averaged(nn.Module):
    """Asks in `__new__` for what only `__init__` is given, as averaged copies of models do."""

    def __new__(cls, model, decay=0.9):
        assert isinstance(model, nn.Module)
        return super().__new__(cls)

    def __init__(self, model, decay=0.9):
        super().__init__()
        self.model, self.decay = model, decay
        self.kernels = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]


def test_a_module_arrives_that_pickle_could_not_make_and_kernels_of_attention_with_it():
    model = Averaged(nn.Linear(3, 4), decay=0.5)
    copy = unpickle_skeleton(pickle_skeleton(model), torch.device("cpu"))
    assert type(copy) is Averaged and copy.decay == 0.5 and copy.model.weight.is_meta
    assert copy.kernels == model.kernels


class Scaled(nn.Module):
    def forward(self, x):
        return 2 * x


def test_an_attribute_refers_to_the_modules_of_the_worker_s_model():
    script, worker = nn.Sequential(nn.Linear(3, 2), Scaled()), nn.Sequential(nn.Linear(3, 2), Scaled())
    path_of = {id(module): path for path, module in script.named_modules()}
    value = {"forward": script[0].forward, "compiled": torch.compile(script[1].forward), "root": script}
    arrived = unpickle_attribute(pickle_attribute(value, path_of), worker)
    assert arrived == {"forward": worker[0].forward, "compiled": worker[1].forward, "root": worker}


class SavesItself(nn.Module):
    """Pickles itself as a file of values, of which a skeleton would have no parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def __reduce__(self):
        return SavesItself, ()

    def forward(self, x):
        return self.layer(x)


class TrackedList(list):
    """Tells a tracker what is put in."""

    def __init__(self, values, tracker):
        self.tracker = tracker
        super().__init__(values)

    def extend(self, values):
        self.tracker.update(values)
        super().extend(values)

    append = None


class TrackedDict(dict):
    def __init__(self, values, tracker):
        self.tracker = tracker
        super().__init__(values)

    def __setitem__(self, key, value):
        self.tracker.add(value)
        super().__setitem__(key, value)


def test_a_module_that_would_save_its_values_arrives_by_its_attributes():
    model = nn.Sequential(SavesItself())
    copy = unpickle_skeleton(pickle_skeleton(model), torch.device("cpu"))
    assert [name for name, _ in copy.named_parameters()] == ["0.layer.weight", "0.layer.bias"]
    assert all(parameter.is_meta for parameter in copy.parameters())


def test_containers_that_track_what_is_put_in_arrive_with_their_trackers():
    model, tracker = nn.Linear(2, 2), set()
    model.kept = TrackedList([1, 2], tracker)
    model.named = TrackedDict({"a": 3}, tracker)
    copy = unpickle_skeleton(pickle_skeleton(model), torch.device("cpu"))
    assert copy.kept == [1, 2] and copy.named == {"a": 3}
    assert type(copy.kept) is TrackedList and type(copy.named) is TrackedDict
    assert copy.kept.tracker is copy.named.tracker == set()


def test_operations_of_pytorch_are_themselves_in_a_worker():
    table = {torch.ops.aten.clone.default: 1, torch.ops.aten.add: 2}
    assert unpickle_attribute(pickle_attribute(table, {}), nn.Module()) == table


class _Switch:
    """As Keras' switch of backends: it reads an attribute to find the others."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, name):
        return f"{name} of {self.name}"


def test_an_object_that_looks_up_what_it_lacks_arrives_with_its_attributes():
    layer = nn.Linear(2, 2)
    layer.switch = _Switch("torch")
    copy = unpickle_skeleton(pickle_skeleton(layer), torch.device("cpu"))
    assert copy.switch.name == "torch" and copy.switch.sum == "sum of torch"


def test_weak_references_to_tensors_and_modules_arrive_as_such():
    """Recurrent layers keep one to each weight; a script that puts a tensor in its place leaves a dead one."""
    layer = nn.LSTM(3, 4)
    model = nn.Sequential(layer, nn.Linear(4, 2))
    model.first, gone = weakref.ref(layer), torch.ones(2)
    model.dead = weakref.ref(gone)
    del gone
    copy = unpickle_skeleton(pickle_skeleton(model), torch.device("cpu"))
    assert copy.first() is copy[0] and copy.dead() is None
    references = unpickle_attribute(pickle_attribute(layer._flat_weight_refs, {}), copy)
    assert all(isinstance(one, weakref.ref) for one in references)
