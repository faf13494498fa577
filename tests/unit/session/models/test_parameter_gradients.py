"""When reading gradients waits for workers, and what they are told of gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moreh_ap.device.tensor import ACCELERATOR, VirtualTensor
from moreh_ap.device.values import Cell, Here
from moreh_ap.protocol.messages.state import WriteState
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.session.models.parameter_gradients import (
    Gradients,
    ParameterList,
    clear_gradients_of,
    expected_will_do,
    list_of_one_model,
)
from moreh_ap.session.state_tensors import ModelState, OnWorkers

KIND = ("forward",)


class Backward:
    """The answer to a backward pass; counts who waits for it."""

    def __init__(self, *flags):
        self.flags, self.times_read, self._callbacks = flags, 0, []

    def add_done_callback(self, callback):
        self._callbacks.append(callback)

    def failed(self):
        return False

    def arrive(self):
        for callback in self._callbacks:
            callback(self)
        self.times_read = 0

    def result(self):
        self.times_read += 1
        return self.flags


class Outbox:
    def __init__(self):
        self.posted, self.cleared, self.times_failed = [], [], 0

    def post(self, command):
        self.posted.append(command)

    def post_clear(self, refs):
        self.cleared += refs


@pytest.fixture
def gradients():
    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("a", "b")}
    outbox = Outbox()
    holder = SimpleNamespace(session=SimpleNamespace(outbox=outbox), handle=lambda ref, like: torch.zeros_like(like))
    made = Gradients(holder, "model0", parameters)
    made.outbox, made.parameters = outbox, parameters
    return made


def ref(name):
    return StateRef("model0", "grad", name)


def backward(gradients, *flags, kind=KIND):
    """A backward of which one worker or several answer which parameters have a gradient now; already answered."""
    answer = Backward(*flags)
    gradients.after_backward(kind, answer)
    answer.arrive()
    return answer


def learn_that_all_are_reached(gradients):
    backward(gradients, [True, True])
    gradients.clear(("a", "b"))
    gradients.outbox.cleared.clear()


def test_the_first_backward_is_waited_for_and_names_what_has_a_gradient(gradients):
    answer = backward(gradients, [False, True], [False, False])
    assert gradients.refs(("a", "b")) == (ref("b"),)
    assert answer.times_read == 1
    assert gradients.get("a") is None and gradients.get("b") is gradients.get("b") is not None
    assert answer.times_read == 1, "an answer is taken in once"


def test_where_all_were_reached_all_are_expected_and_clipping_does_not_wait(gradients):
    learn_that_all_are_reached(gradients)
    answer = Backward([True, True])
    gradients.after_backward(KIND, answer)
    assert gradients.refs(("a", "b")) == (ref("a"), ref("b"))
    with expected_will_do():
        assert gradients.get("a") is not None
    gradients.clear(("a", "b"))
    assert gradients.outbox.cleared == [ref("a"), ref("b")] and answer.times_read == 0


def test_reading_a_gradient_waits_even_where_all_are_expected(gradients):
    learn_that_all_are_reached(gradients)
    answer = backward(gradients, [True, False])
    assert gradients.get("b") is None and answer.times_read == 1


def test_less_than_all_and_other_kinds_are_never_expected(gradients):
    backward(gradients, [True, False])
    gradients.clear(("a", "b"))
    assert backward(gradients, [True, False]).times_read == 0
    answer = gradients._last
    gradients.refs(("a",))
    assert answer.times_read == 1
    gradients.clear(("a", "b"))
    learn_that_all_are_reached(gradients)
    other = backward(gradients, [True, True], kind=("another",))
    gradients.refs(("a",))
    assert other.times_read == 1


def test_a_kind_that_once_reached_less_than_expected_is_not_expected_any_more(gradients):
    learn_that_all_are_reached(gradients)
    backward(gradients, [True, False])
    gradients.get("a")
    gradients.clear(("a", "b"))
    for _ in range(2):
        answer = backward(gradients, [True, True])
        gradients.refs(("a",))
        assert answer.times_read == 1
        gradients.clear(("a", "b"))


def test_a_frozen_parameter_need_not_be_reached(gradients):
    gradients.parameters["b"].requires_grad_(False)
    backward(gradients, [True, False])
    gradients.clear(("a",))
    answer = backward(gradients, [True, False])
    assert gradients.refs(("a", "b")) == (ref("a"),) and answer.times_read == 0


def test_what_the_script_sets_or_clears_behind_a_backward_counts_more_than_its_answer(gradients):
    learn_that_all_are_reached(gradients)
    gradients.after_backward(KIND, Backward([True, True]))
    gradients.clear(("a",))
    assert gradients.get("a") is None and gradients.get("b") is not None
    gradients.set("a", torch.ones(2))
    assert gradients.get("a") is not None
    (written,) = (command for command in gradients.outbox.posted if isinstance(command, WriteState))
    assert list(written.values) == [ref("a")]


def test_only_gradients_that_exist_are_cleared_on_the_workers(gradients):
    gradients.clear(("a", "b"))
    gradients.set("b", None)
    assert gradients.outbox.cleared == [] and gradients.outbox.posted == []


def test_inputs_are_waited_for_until_all_of_a_kind_were_reached(gradients):
    missing, all_there = Backward([True, True, True, False]), Backward([True, False, True, True])
    assert list(gradients.inputs_reached(KIND, missing, 2)) == [True, False]
    assert list(gradients.inputs_reached(KIND, all_there, 2)) == [True, True]
    assert list(gradients.inputs_reached(KIND, later := Backward(), 2)) == [True, True] and later.times_read == 0


@pytest.fixture
def model_parameters():
    """A function that makes the parameters of a model on the workers, by name, and their holder."""

    def make(*names):
        holder = ModelState(SimpleNamespace(outbox=Outbox()), SimpleNamespace())
        values = {name: OnWorkers(holder, StateRef("model0", "param", name)) for name in names}
        return holder, [VirtualTensor(Cell(value, ACCELERATOR), torch.zeros(2)) for value in values.values()]

    return make


def test_a_list_of_parameters_is_looked_at_again_where_one_has_moved_or_is_another(model_parameters):
    holder, (a, b, c) = model_parameters("a", "b", "c")
    assert list_of_one_model([a, b]) == (holder, ["a", "b"])
    (known,) = holder.lists.values()
    assert known.is_still([a, b]) and list_of_one_model([a, b])[1] is known.names[holder]
    assert not known.is_still([a, c]) and not known.is_still([b, a]) and not known.is_still([a])
    assert list_of_one_model([a, c]) == (holder, ["a", "c"])
    b._cell.value = Here(torch.zeros(2))
    assert not known.is_still([a, b]) and list_of_one_model([a, b]) is None


def test_parameters_of_several_models_and_ordinary_ones_are_no_list_of_one_model(model_parameters):
    (_, (a,)), (_, (other,)) = model_parameters("a"), model_parameters("a")
    ordinary = torch.nn.Parameter(torch.zeros(2))
    for parameters in ([], [a, other], [a, ordinary], [ordinary, a]):
        assert list_of_one_model(parameters) is None and not clear_gradients_of(parameters)
    assert ParameterList([a, other]).is_still([a, other])


def test_a_parameter_that_has_become_an_ordinary_tensor_is_not_still_in_its_list(model_parameters):
    _, (a, b) = model_parameters("a", "b")
    known = ParameterList([a, b])
    del b._cell  # as `torch.utils.swap_tensors` does with an ordinary tensor
    assert not known.is_still([a, b])


def test_a_list_of_gradients_is_cleared_as_one(model_parameters):
    holder, parameters = model_parameters("a", "b", "c")
    values = {name: torch.zeros(2, requires_grad=True) for name in "abc"}
    holder.gradients = Gradients(holder, "model0", values)
    backward(holder.gradients, [True, False, True])
    assert holder.gradients.names() == {"a", "c"}
    assert clear_gradients_of(parameters[:2])
    assert holder.session.outbox.cleared == [ref("a")] and holder.gradients.names() == {"c"}
