"""The context of trial runs of a forward: without dropout, and with the state of the model restored afterwards.

Decides which state a trial run must not change. Must not know what is tried.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moreh_ap.parallelizer.data.fsdp import recover, settle
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.loss.mean_rules import MeanRules
from moreh_ap.parallelizer.rng.policy import streams_untouched
from moreh_ap.parallelizer.rng.shared_draws import UnsharedDraw
from moreh_ap.parallelizer.trial.outside_state import outside_restored
from moreh_ap.protocol.added_members import Members
from moreh_ap.protocol.module_attributes import has_memory, has_same_items, own_attributes, refill

_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
}


_PLACE_OF_DROPOUT = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


class NoDropout(TorchFunctionMode):
    """While active, dropout returns what it was given."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _PLACE_OF_DROPOUT:
            place = _PLACE_OF_DROPOUT[func]
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if getattr(func, "__name__", "") in RECURRENT:  # dropout between layers is the only fraction that they get
            args = tuple(0.0 if isinstance(arg, float) else arg for arg in args)
        return func(*args, **kwargs)


class StateBefore:
    """A copy of the state that a forward and hooks may change: buffers, attributes (``self.hidden = hidden``), members.

    Args:
        module: The model in its present state.
        written: Parameters that the forward changes, whose values are copied too.

    Attributes:
        members: What its modules hold at present.
    """

    def __init__(self, module: nn.Module, written: Sequence[Tensor] = ()) -> None:
        self.members = Members(module)
        values = [(tensor, tensor.detach().clone()) for tensor in (*module.buffers(), *written)]
        self._with_graph = {id(tensor) for tensor, _ in values if tensor.grad_fn is not None}
        self._held = [
            (submodule, dict(submodule._buffers), own_attributes(submodule)) for submodule in module.modules()
        ]
        kept = [value for _, _, attributes in self._held for value in attributes.values()]
        tensors = (value for value in kept if isinstance(value, torch.Tensor) and value.grad_fn is None)
        self._values = values + [(tensor, tensor.detach().clone()) for tensor in tensors if has_memory(tensor)]
        self._generators = [(value, value.get_state()) for value in kept if isinstance(value, torch.Generator)]
        self._containers = [(value, value.copy()) for value in kept if type(value) in (list, dict, set)]

    def left(self) -> LeftByForward:
        """Returns what the forward has left in attributes, and in lists, dicts and sets that were there before."""
        changed = []
        for submodule, _, were in self._held:
            now = own_attributes(submodule)
            changed.append((submodule, {name: value for name, value in now.items() if were.get(name) is not value}))
        containers = [(one, one.copy()) for one, contents in self._containers if not has_same_items(one, contents)]
        return LeftByForward([one for one in changed if one[1]], containers)

    def put_back(self) -> None:
        """Restores the state."""
        self.members.take_back()
        for submodule, buffers, attributes in self._held:
            submodule._buffers.clear()
            submodule._buffers.update(buffers)
            for name in own_attributes(submodule).keys() - attributes.keys():
                del vars(submodule)[name]
            vars(submodule).update(attributes)
        for container, contents in self._containers:
            refill(container, contents)
        for generator, state in self._generators:
            generator.set_state(state)
        for buffer, value in self._values:
            if buffer.grad_fn is not None and id(buffer) not in self._with_graph:
                buffer.detach_()  # the forward kept a result in it, whose graph the trial has freed
            if buffer.shape != value.shape:
                buffer.resize_(value.shape)  # observers of quantization learn in their first forward how many channels
            if not torch.equal(buffer, value):
                buffer.data.copy_(value)  # `.data`: a graph that has kept the buffer is not told of the change


class LeftByForward:
    """What a forward has left on the modules for its backward, as reversible layers leave the random states with which
    that computes them again. See `StateBefore.left`."""

    def __init__(
        self, attributes: Sequence[tuple[nn.Module, dict[str, Any]]], containers: Sequence[tuple[Any, Any]]
    ) -> None:
        self._attributes, self._containers = attributes, containers

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        """Puts it there for the block, and what is there now back."""
        others = [(vars(submodule), changed, dict(vars(submodule))) for submodule, changed in self._attributes]
        contents = [(container, container.copy()) for container, _ in self._containers]
        for namespace, changed, _ in others:
            namespace.update(changed)
        for container, left in self._containers:
            refill(container, left)
        try:
            yield
        finally:
            for namespace, changed, before in others:
                for name in changed:
                    namespace.pop(name, None)
                    namespace.update({name: before[name]} if name in before else {})
            for container, were in contents:
                refill(container, were)


@contextlib.contextmanager
def state_restored(module: nn.Module) -> Iterator[StateBefore]:
    """Puts the state of a model, and what it has outside of it, back after the block. A graph that has kept a buffer is
    not told of what changes it meanwhile."""
    state = StateBefore(module)
    buffers = tuple(buffer for buffer in module.buffers() if not buffer.is_inference())
    try:
        with torch.autograd._unsafe_preserve_version_counter(buffers), outside_restored(module):
            yield state
    finally:
        state.put_back()


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Puts gradients, state and random numbers back after the block, which prints nothing."""
    settle(module)
    params = [param for param in module.parameters() if param.is_leaf]
    grads = [param.grad for param in params]
    for param in params:
        param.grad = None
    device = next((p.device for p in params if p.device.type == "cuda"), None)
    silence = contextlib.redirect_stdout(io.StringIO())
    with streams_untouched(device), silence, state_restored(module):
        try:
            yield
        finally:
            settle(module)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad


def clear_gradients(module: nn.Module) -> None:
    """Removes what a trial has left."""
    for param in module.parameters():
        param.grad = None


class Refused(Exception):
    """A forward does not do what was tried with it; the text says why."""


def attempt(step: Callable[[], object], module: nn.Module) -> str:
    """Returns why `step` failed, "" where it did not. Whose fault an error is, `fault_finding.py` finds out."""
    try:
        step()
    except (Refused, UnsharedDraw) as refusal:
        return str(refusal)
    except Exception as error:  # any error of the user's forward: on fewer rows than it was written for, or always
        recover(module)
        first_line = str(error).partition("\n")[0]
        return f"the forward of a few rows raised {type(error).__name__}: {first_line}"
    return ""


class PaddedAlike(GlobalReduction):
    """Records means as `GlobalReduction` does, with the largest numbers of all rows where some rows run: packed
    sequences are padded to the longest of all, and the same experts are called.

    See [Note: lengths] and [Note: loads] in `loss_reduction.py`.

    Args:
        device: This worker's device.
        rules: Which numbers are means over the batch.
        lengths: The largest numbers, and loads, of all rows together, at the sites where they were taken.
    """

    def __init__(self, device: torch.device, *, rules: MeanRules, lengths: Sequence[Tensor]) -> None:
        super().__init__(device, record=True, rules=rules)
        self._lengths = lengths

    def _largest(self, own: int) -> int:
        known = self._known_at(len(self.local_denominators))
        largest = super()._largest(own)
        return largest if known is None or known.ndim else max(largest, int(known))

    def _load_of(self, own: Tensor) -> Tensor:
        """Returns the loads of all rows, also if other random numbers route these rows to other experts."""
        known = self._known_at(len(self.local_denominators))
        load = super()._load_of(own)
        return load if known is None or known.shape != load.shape else known.to(load.device, load.dtype)

    def _known_at(self, site: int) -> Tensor | None:
        return self._lengths[site] if site < len(self._lengths) else None


def may_pad(module: nn.Module) -> bool:
    """Says whether a model may pad packed sequences: it has a recurrent layer."""
    return any(isinstance(submodule, nn.RNNBase) for submodule in module.modules())


def refuse_states_of_others(name: str, args: tuple[Any, ...]) -> None:
    """Raises where a recurrent function gets states of another number of rows than its input: modules check that, the
    function itself writes where it must not."""
    if name not in RECURRENT:
        return
    given, is_packed = args[0], isinstance(args[1], Tensor) and args[1].ndim == 1
    states = args[2] if is_packed else args[1]
    rows = int(args[1][0]) if is_packed else given.shape[0 if args[-1] else 1]
    for state in (states,) if isinstance(states, Tensor) else states:
        if state.ndim != 3 or state.shape[1] != rows:
            raise ValueError(f"{name} gets states of another number of rows")
