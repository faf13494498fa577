"""Tensors of a library's class keep it on the accelerator."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from moreh_ap.device import tensor_classes
from moreh_ap.device.patches import modules
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.patching import Patches


class Picture(Tensor):
    """A tensor with a note, which results have too."""

    note = "none"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        source = next((argument for argument in args if isinstance(argument, Picture)), None)
        if isinstance(result, Picture) and source is not None:
            result.__dict__ = copy.copy(source.__dict__)  # as fastai does
        return result


@pytest.fixture(autouse=True)
def classes_in_force():
    patches = Patches()
    tensor_classes.install(patches)
    yield
    patches.undo()


@pytest.fixture
def picture():
    made = torch.arange(4.0).as_subclass(Picture)
    made.note = "a note"
    return made


def test_a_move_keeps_class_and_attributes(picture):
    there = picture.cuda()
    assert isinstance(there, Picture) and isinstance(there, VirtualTensor)
    assert there.is_cuda and there.note == "a note" and type(there).__name__ == "Picture"
    back = there.cpu()
    assert type(back) is Picture and back.note == "a note" and torch.equal(back, picture)
    assert isinstance(picture.to("cuda", torch.float64), Picture)


def test_operations_keep_class_and_attributes(picture):
    there = picture.cuda()
    result = there[1:] * 2 + torch.ones(3, device="cuda")
    assert isinstance(result, Picture) and result.is_cuda and result.note == "a note"
    assert result.tolist() == [3.0, 5.0, 7.0] and there.shape == torch.Size([4]) and there.sum().item() == 6.0
    assert isinstance(there.max(0), torch.return_types.max)
    assert not isinstance(torch.ones(3, device="cuda"), Picture)


def test_the_class_is_given_and_taken_with_gradients():
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    given = leaf.as_subclass(Picture)
    assert isinstance(given, Picture) and not isinstance(given.as_subclass(Tensor), Picture)
    (given * 2).sum().backward()
    assert leaf.grad.tolist() == [2.0, 2.0, 2.0]


def test_the_class_of_another_tensor_means_the_librarys(picture):
    there = picture.cuda()
    assert type(torch.ones(2).as_subclass(type(there))) is Picture
    assert type(torch.ones(2).as_subclass(type(torch.ones(2, device="cuda")))) is Tensor


def test_attributes_may_be_replaced_as_a_whole(picture):
    there = picture.cuda()
    there.__dict__ = {"note": "another"}
    assert there.note == "another" and there.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_copies_and_pickles_keep_the_class(picture):
    there = picture.cuda()
    twin = copy.deepcopy(there)
    assert isinstance(twin, Picture) and twin.is_cuda and twin.note == "a note"
    loaded = pickle.loads(pickle.dumps(there))
    assert type(loaded) is Picture and loaded.note == "a note" and torch.equal(loaded, picture)


def test_results_of_a_model_are_of_the_class_of_its_arguments(picture):
    there, result = picture.cuda(), {"logits": torch.ones(2, device="cuda")}
    assert modules._have_classes((), {"picture": there}) and not modules._have_classes((result,), {})
    found = tensor_classes.result_of_module(result, (there,), {})["logits"]
    assert isinstance(found, Picture) and found.is_cuda


def test_attributes_of_an_accelerator_tensor_that_are_copied_to_another_do_not_keep_it_from_being_saved():
    plain = torch.ones(2).as_subclass(Picture)
    plain.__dict__ = copy.copy(torch.ones(2, device="cuda").__dict__)  # as fastai keeps what a tensor was known by
    assert torch.equal(pickle.loads(pickle.dumps(plain)), plain)


def test_a_table_of_the_library_finds_the_class(picture):
    class Other(Tensor):
        pass

    kind = type(picture.cuda())
    table = {Picture: "picture", Other: "other", Tensor: "tensor"}
    assert table[kind] == "picture" and {kind: 1}[Picture] == 1
    assert kind == Picture and Picture == kind and kind in (Other, Picture) and kind is not Picture
    assert kind != Other and kind != Tensor and kind != VirtualTensor and kind not in {Other, Tensor}
    other = type(torch.ones(1).as_subclass(Other).cuda())
    assert kind != other and other == Other

    class Derived(kind):
        pass

    assert Derived != kind and Derived != Picture and len({Derived, kind, Picture}) == 2
