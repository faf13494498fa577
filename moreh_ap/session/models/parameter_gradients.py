"""Which parameters have a gradient on the workers, known without asking them at every step.

The reply to a backward says which parameters have a gradient now. If the first backward of a kind has reached all
parameters, the controller expects the same of the next, so that clipping by norm and ``optimizer.zero_grad()`` do not
wait. Any other reader of a gradient waits for the reply, as does every reader after a backward of another kind.

[Note: expected too many]
Randomly dropped layers, and experts that get no token, sometimes have no gradient. Clipping by norm and `zero_grad` do
nothing to a gradient that is expected and missing: workers skip it, as PyTorch does. A gradient that is present and not
expected would be forgotten by `zero_grad`; that is why fewer than all are never expected. The thread that waits for a
reply processes it, never the thread that receives it: a script reads ``parameter.grad`` twice, to see that a gradient
exists and to use it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.protocol.messages.state import KeepState, WriteState
from moreh_ap.protocol.messages.tensors import StateRef, TensorData
from moreh_ap.session.outbox import Posted
from moreh_ap.session.state_tensors import ModelState

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


class Gradients:
    """Gradients of one model's parameters, by name.

    Args:
        holder: The holder of the model's tensors.
        owner: The model's name on the workers.
        parameters: Its parameters by name.
    """

    def __init__(self, holder: ModelState, owner: str, parameters: Mapping[str, VirtualTensor]) -> None:
        self._holder, self._owner, self._parameters = holder, owner, parameters
        self._outbox = holder.session.outbox
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
        if not self._patterns.get(kind, frozenset()) <= found:
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
            handle = self._holder.handle(StateRef(self._owner, "grad", name), self._parameters[name].detach())
            self._handles[name] = handle
        return handle

    def refs(self, names: Iterable[str]) -> tuple[StateRef, ...]:
        """Returns the references of the gradients that are expected to exist. May wait."""
        self._settle(expected_suffices=True)
        return tuple(StateRef(self._owner, "grad", name) for name in names if name in self._present)

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
        self._outbox.post(WriteState({StateRef(self._owner, "grad", name): TensorData.of(host)}))
        self._present.add(name)

    def clear(self, names: Iterable[str]) -> None:
        """Clears gradients; a gradient that the script still holds becomes a tensor of its own."""
        self._settle(expected_suffices=True)
        cleared = []
        for name in names:
            self._set_since[name] = False
            if name not in self._present:
                continue
            self._present.discard(name)
            ref = StateRef(self._owner, "grad", name)
            handle = self._handles.pop(name, None)
            if handle is not None:
                kept = self._holder.promise(handle)
                self._outbox.post(KeepState(ref, kept._cell.value.ref))  # type: ignore[attr-defined]
                handle._cell.value = kept._cell.value
            cleared.append(ref)
        self._outbox.post_clear(cleared)

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
        if self._last is None or (expected_suffices and self._is_expected):
            return
        self._present = set(self.decode(self._last))
        for name, is_there in self._set_since.items():
            (self._present.add if is_there else self._present.discard)(name)
        self._last, self._is_expected = None, True

    def decode(self, reply: Any) -> frozenset[str]:
        """Returns the parameters that have a gradient, from the reply to a backward; waits."""
        flags = zip(*reply.result())  # one item for each worker: only some workers hold the parameter
        return frozenset(name for name, having in zip(self._parameters, flags) if any(having))
