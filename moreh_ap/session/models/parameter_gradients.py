"""Which parameters have a gradient on the workers, known without asking them at every step; lists of parameters.

The reply to a backward says which parameters have a gradient now. If the first backward of a kind has reached all
parameters, the controller expects the same of the next, so that clipping by norm and ``optimizer.zero_grad()`` do not
wait. Any other reader of a gradient waits for the reply, as does every reader after a backward of another kind.

[Note: expected too many]
Randomly dropped layers, and experts that get no token, sometimes have no gradient. Clipping by norm and `zero_grad` do
nothing to a gradient that is expected and missing: workers skip it, as PyTorch does. A gradient that is present and not
expected would be forgotten by `zero_grad`; that is why fewer than all are never expected. The thread that waits for a
reply processes it, never the thread that receives it: a script reads ``parameter.grad`` twice, to see that a gradient
exists and to use it.

[Note: lists of parameters]
``clip_grad_norm_(model.parameters())`` and an optimizer's groups are the same parameters at the same place in every
step. Whether they still are is asked by C functions below `map`, so that a step makes as many Python calls for
hundreds of parameters as for ten.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import UnsupportedError
from moreh_ap.protocol.messages.models import DescribeGradients
from moreh_ap.protocol.messages.state import KeepState, WriteState
from moreh_ap.protocol.messages.tensors import StateRef, TensorData
from moreh_ap.runtime.relay.worker_values import ItemValues
from moreh_ap.session.outbox import Posted
from moreh_ap.session.state_tensors import ModelState, OnWorkers
from moreh_ap.states import ModelPhase

_MAX_LISTS = 16
_value_of = operator.attrgetter("_cell.value")
_params_of = operator.itemgetter("params")

Kind = tuple[Hashable, ...]
"""The module called, the changes of the model before the call, and which of its outputs have a gradient."""

separate_gradients: ContextVar[Any] = ContextVar("separate_gradients", default=None)
"""Collects gradients apart from the accumulated ones (`autograd_api.Apart`); None while gradients accumulate."""

_expected_will_do: ContextVar[bool] = ContextVar("expected_will_do", default=False)


@contextlib.contextmanager
def expected_will_do() -> Iterator[None]:
    """Inside, reading a gradient does not wait if all are expected. See [Note: expected too many]."""
    token = _expected_will_do.set(True)
    try:
        yield
    finally:
        _expected_will_do.reset(token)


def refuse_calls_of_before(model: Any) -> None:
    """Refuses a backward through a call of a model that has been laid out anew since, or has left the workers: its
    parameters, or some of them, are elsewhere, and would miss these gradients.

    Raises:
        UnsupportedError: Gradients of its parameters are wanted.
    """
    if model.phase.current not in (ModelPhase.DIVIDED, ModelPhase.RELEASED):
        return
    apart = separate_gradients.get()
    if model.has_trainable_parameters() if apart is None else apart.wants_of(model.root):
        raise UnsupportedError(
            f"A backward goes through a call of {type(model.root).__name__} from before its hooks, layers or parameters"
            " were added, replaced or moved, and the model was called again: gradients of that call would be lost.",
            allowed="the backward of a call before the model is changed",
            fix="loss.backward()  # before register_forward_hook, add_module, .cpu() or the like",
        )


class Gradients:
    """Gradients of one model's parameters, by name.

    Args:
        holder: The holder of the model's tensors.
        owner: The model's name on the workers.
        parameters: Its parameters by name.
    """

    def __init__(self, holder: ModelState, owner: str, parameters: Mapping[str, VirtualTensor]) -> None:
        self._holder, self._owner, self._parameters = holder, owner, parameters
        self._refs = {name: StateRef(owner, "grad", name) for name in parameters}
        self._outbox = holder.session.outbox
        self._times_failed = self._outbox.times_failed
        self._present: set[str] = set()
        self._patterns: dict[Kind, frozenset[str]] = {}
        self._varying: set[Kind] = set()
        self._reach_all_inputs: set[Kind] = set()
        self._last: Posted | None = None  # the last backward, until its reply is processed
        self._is_expected = True  # whether `_present` has at least all parameters that its reply will name
        self._set_since: dict[str, bool] = {}  # parameters whose gradient was set or cleared after it
        # Weak: a handle that is alive when its gradient is cleared is held by the script.
        self._handles: weakref.WeakValueDictionary[str, VirtualTensor] = weakref.WeakValueDictionary()

    def after_backward(self, kind: Kind, reply: Posted) -> None:
        """Records that a backward was sent; backwards of one `kind` reach the same parameters."""
        had_none = self._is_expected and not self._present
        expected = self._patterns.get(kind)
        self._present |= expected or frozenset()
        self._is_expected = self._is_expected and expected is not None
        self._last = reply
        self._set_since.clear()
        reply.add_done_callback(lambda answered: self._learn(kind, had_none, answered))

    def _learn(self, kind: Kind, had_none: bool, answered: Posted) -> None:
        """Records whether backwards of this kind reach all parameters; shown only if no gradient existed before."""
        if answered.failed():
            return
        found = self.decode(answered)
        known = self._patterns.get(kind, frozenset())
        if found and known == found:
            return
        if not known <= found:
            self._varying.add(kind)
            self._patterns.pop(kind, None)
        elif had_none and kind not in self._varying:
            trainable = {name for name, parameter in self._parameters.items() if parameter.requires_grad}
            if trainable <= found:
                self._patterns[kind] = found

    def inputs_reached(self, kind: Kind, reply: Posted, num_inputs: int) -> Sequence[bool]:
        """Returns which differentiable inputs of the call a backward has reached; waits if that is not predicted."""
        if kind in self._reach_all_inputs:
            return [True] * num_inputs
        flags = zip(*reply.result())
        reached = [any(having) for having in flags][len(self._parameters) :]
        if all(reached):
            self._reach_all_inputs.add(kind)
        return reached

    def get(self, name: str) -> Tensor | None:
        """Returns a handle on the gradient of parameter `name`, or None if it has none."""
        self._settle(expected_suffices=_expected_will_do.get())
        if name not in self._present:
            return None
        handle = self._handles.get(name)
        if handle is None:
            handle = self._holder.handle(self._refs[name], self._parameters[name].detach())
            self._handles[name] = handle
        return handle

    def refs(self, names: Iterable[str]) -> tuple[StateRef, ...]:
        """Returns the references of the gradients that are expected to exist. May wait."""
        self._settle(expected_suffices=True)
        return tuple(map(self._refs.__getitem__, filter(self._present.__contains__, names)))

    def names(self) -> frozenset[str]:
        """Returns the parameters that have a gradient; may wait."""
        self._settle(expected_suffices=False)
        return frozenset(self._present)

    def set(self, name: str, gradient: Tensor | None) -> None:
        """Clears the gradient of `name`, or replaces it by a tensor of the parameter's shape."""
        if gradient is None:
            self.clear((name,))
            return
        self._settle(expected_suffices=True)
        self._set_since[name] = True
        if gradient is self._handles.get(name):
            return
        host = gradient.to_host() if isinstance(gradient, VirtualTensor) else gradient.detach()
        host = (
            host if host.layout is torch.strided else host.to_dense()
        )  # of `nn.Embedding(sparse=True)` in this process
        self._outbox.post(WriteState({self._refs[name]: TensorData.of(host)}))
        self._present.add(name)

    def clear(self, names: Iterable[str]) -> None:
        """Clears gradients; a gradient that the script still holds becomes a tensor of its own."""
        self._settle(expected_suffices=True)
        absent = dict.fromkeys(names, False)
        self._set_since.update(absent)
        cleared = list(filter(self._present.__contains__, absent))
        self._present.difference_update(cleared)
        for name in cleared if self._handles else ():
            handle = self._handles.pop(name, None)
            if handle is not None:
                kept = self._holder.promise(handle)
                self._outbox.post(KeepState(self._refs[name], kept._cell.value.ref))  # type: ignore[attr-defined]
                handle._cell.value = kept._cell.value
        self._outbox.post_clear(list(map(self._refs.__getitem__, cleared)))

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds a gradient from the script's own computations to the gradient of `name`."""
        present = self.get(name)
        if present is None:
            self.set(name, gradient)
        else:
            with torch.no_grad():
                present.add_(gradient)

    def _settle(self, expected_suffices: bool) -> None:
        """Processes the reply to the last backward; waits, unless all gradients are expected and that suffices."""
        times_failed = self._outbox.times_failed
        if times_failed != self._times_failed:  # what was expected may have been skipped
            self._present = set(self.decode(self._outbox.submit(DescribeGradients(self._owner))))
            self._set_since.clear()
            self._last, self._is_expected, self._times_failed = None, True, times_failed
        if self._last is None or (expected_suffices and self._is_expected):
            return
        self._present = set(self.decode(self._last))
        for name, is_there in self._set_since.items():
            (self._present.add if is_there else self._present.discard)(name)
        self._last, self._is_expected = None, True

    def decode(self, reply: Any) -> frozenset[str]:
        """Returns the parameters that have a gradient, from the reply to a backward; waits."""
        flags = reply.result()  # one item for each worker: only some workers hold the parameter
        if isinstance(flags, ItemValues):
            flags = flags.distinct()
        return frozenset(compress(self._parameters, flags[0] if len(flags) == 1 else map(max, *flags)))


class ParameterList:
    """Parameters that are on the workers. See [Note: lists of parameters].

    Args:
        parameters: The parameters.

    Attributes:
        names: Their names, by the model that they belong to.

    Raises:
        ValueError: A parameter is not on the workers.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._values: list[Any] = []
        self.names: dict[ModelState, list[str]] = {}
        for parameter in parameters:
            value = parameter._cell.value if isinstance(parameter, VirtualTensor) else None
            if not (isinstance(value, OnWorkers) and isinstance(value.owner, ModelState) and value.ref.kind == "param"):
                raise ValueError("a parameter is not on the workers")
            self._values.append(value)
            self.names.setdefault(value.owner, []).append(value.ref.name)

    def is_still(self, parameters: Sequence[Tensor]) -> bool:
        """Returns whether these are the parameters of the list, and still at the same place."""
        if len(parameters) != len(self._parameters) or not all(map(operator.is_, parameters, self._parameters)):
            return False
        try:
            return all(map(operator.is_, map(_value_of, parameters), self._values))
        except AttributeError:  # one has become an ordinary tensor
            return False

    def clear_gradients(self) -> None:
        """Sets the gradients to None."""
        for holder, names in self.names.items():
            holder.gradients.clear(names)


def list_of_one_model(parameters: Sequence[Tensor]) -> tuple[ModelState, list[str]] | None:
    """Returns the model that all parameters belong to, and their names in it.

    None if there are none, one is not on the workers, or they belong to several models.
    """
    first = parameters[0] if parameters else None
    value = first._cell.value if isinstance(first, VirtualTensor) else None
    if not isinstance(value, OnWorkers) or not isinstance(value.owner, ModelState):
        return None
    holder = value.owner
    key = (id(first), len(parameters))
    known = holder.lists.get(key)  # kept there, since it has to go with the model
    if known is None or not known.is_still(parameters):
        try:
            known = ParameterList(parameters)
        except ValueError:
            return None
        if len(known.names) > 1:
            return None
        if len(holder.lists) >= _MAX_LISTS:
            holder.lists.clear()
        holder.lists[key] = known
    return holder, known.names[holder]


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """Returns the parameters of all groups."""
    return list(chain.from_iterable(map(_params_of, optimizer.param_groups)))


def group_sizes(optimizer: Optimizer) -> list[int]:
    """Returns how many parameters each group has."""
    return list(map(len, map(_params_of, optimizer.param_groups)))


def clear_gradients_of(parameters: Sequence[Tensor]) -> bool:
    """Sets the gradients of parameters of one model to None; False if they are not that, and nothing was done."""
    found = list_of_one_model(parameters)
    if found is None:
        return False
    holder, names = found
    holder.gradients.clear(names)
    return True
