"""Which parameters have a gradient on the workers, known without asking them at every step.

A backward pass answers which parameters have a gradient now. Where the first backward of a kind has reached all
parameters, the controller expects that of the next, so that clipping by norm and ``optimizer.zero_grad()`` need not
wait. Whoever else looks at gradients waits for the answer, as does everybody after any other backward.

[Note: expected too many]
Layers that are dropped by chance, or experts that no token goes to, have no gradient now and then. To clipping by norm
and `zero_grad` a gradient that is expected and is not there does no harm: workers pass over it, as PyTorch does. One
that is there and not expected would be forgotten by `zero_grad`; that is why less than all is never expected. An answer
is taken in by whoever waits for it, never when it arrives: a script reads ``parameter.grad`` twice, to see that there
is one and to use it.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.protocol.messages.state import KeepState, WriteState
from moreh_ap.protocol.messages.tensors import StateRef, TensorData
from moreh_ap.session.outbox import Posted
from moreh_ap.session.state_tensors import ModelState

Kind = tuple[Hashable, ...]
"""What is called, what was changed in the model before it, and which of its outputs have a gradient."""

_PASSES_OVER = frozenset({"clip_grad_norm_", "clip_grads_with_norm_", "_clip_grads_with_norm_", "zero_grad"})
"""Functions of PyTorch that do nothing to a gradient that is expected and is not there."""

_OWN_REFERENCES = 2  # the variable and the argument of getrefcount: whoever else refers to a handle is the script


class Gradients:
    """Gradients of one model's parameters, by name.

    Args:
        holder: Who holds the model's tensors.
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
        self._last: Posted | None = None  # the last backward, until its answer has been taken in
        self._is_expected = True  # whether `_present` has at least all that its answer will name
        self._set_since: dict[str, bool] = {}  # what was set or forgotten behind it
        self._handles: dict[str, VirtualTensor] = {}

    def after_backward(self, kind: Kind, reply: Posted) -> None:
        """Note that a backward was sent; those of one `kind` reach the same parameters."""
        had_none = self._is_expected and not self._present
        expected = self._patterns.get(kind)
        self._present |= expected or frozenset()
        self._is_expected = self._is_expected and expected is not None
        self._last = reply
        self._set_since.clear()
        reply.add_done_callback(lambda answered: self._learn(kind, had_none, answered))

    def _learn(self, kind: Kind, had_none: bool, answered: Posted) -> None:
        """Which of the gradients that were there already a backward has reached, its answer does not tell."""
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
        """Which of a call's inputs that want a gradient a backward has reached; waits if that cannot be expected."""
        if kind in self._reach_all_inputs:
            return [True] * num_inputs
        flags = zip(*reply.result())
        reached = [any(having) for having in flags][len(self._parameters) :]
        if all(reached):
            self._reach_all_inputs.add(kind)
        return reached

    def get(self, name: str) -> Tensor | None:
        """A handle on the gradient of parameter `name`, or None if it has none."""
        self._settle(expected_will_do=_is_asked_in_passing())
        if name not in self._present:
            return None
        handle = self._handles.get(name)
        if handle is None:
            handle = self._holder.handle(self._ref(name), self._parameters[name].detach())
            self._handles[name] = handle
        return handle

    def set(self, name: str, gradient: Tensor | None) -> None:
        """Forget the gradient of `name`, or replace it by a tensor of the parameter's shape."""
        self._settle(expected_will_do=True)
        self._set_since[name] = gradient is not None
        if gradient is None:
            if name in self._present:
                self._present.discard(name)
                self._let_go(name)
            return
        if gradient is self._handles.get(name):
            return
        host = gradient.to_host() if isinstance(gradient, VirtualTensor) else gradient.detach()
        self._outbox.post(WriteState({self._ref(name): TensorData.of(host)}))
        self._present.add(name)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add what the script's own computations gave for `name` to its gradient."""
        present = self.get(name)
        if present is None:
            self.set(name, gradient)
        else:
            with torch.no_grad():
                present.add_(gradient)

    def _let_go(self, name: str) -> None:
        """The gradient is no longer the parameter's; if the script still holds it, it lives on as a tensor."""
        ref = self._ref(name)
        handle = self._handles.pop(name, None)
        if handle is not None and sys.getrefcount(handle) > _OWN_REFERENCES:
            kept = self._holder.promise(handle)
            self._outbox.post(KeepState(ref, kept._cell.value.ref))  # type: ignore[attr-defined]
            handle._cell.value = kept._cell.value
        self._outbox.post_clear(ref)

    def _ref(self, name: str) -> StateRef:
        return StateRef(self._owner, "grad", name)

    def _settle(self, expected_will_do: bool) -> None:
        """Takes in the answer of the last backward; waits, unless what is expected will do and all is expected."""
        if self._last is None or (expected_will_do and self._is_expected):
            return
        self._present = set(self.decode(self._last))
        for name, is_there in self._set_since.items():
            (self._present.add if is_there else self._present.discard)(name)
        self._last, self._is_expected = None, True

    def decode(self, reply: Any) -> frozenset[str]:
        """The parameters that have a gradient, as workers answered to a backward; waits."""
        flags = zip(*reply.result())  # of a parameter, a worker each: some hold it and others do not
        return frozenset(name for name, having in zip(self._parameters, flags) if any(having))


def _is_asked_in_passing() -> bool:
    """True if it is PyTorch's clipping by norm or `zero_grad` that asks. See [Note: expected too many]."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (_module(frame).startswith("moreh_ap.") or frame.f_code.co_name == "<listcomp>"):
        frame = frame.f_back
    return _module(frame).startswith("torch.") and frame.f_code.co_name in _PASSES_OVER


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
