"""An optimizer whose parameters are on the workers: its steps run there, on the shards.

The user's optimizer object keeps its class, its `param_groups` and its schedulers. `step()` sends the hyper-parameters
that changed. `optimizer.state` becomes a mapping that asks the workers when the script reads it.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.optim import Optimizer

from moreh_ap import log
from moreh_ap.device.patches.optimizer_steps import SCRIPT_STEP
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.values import InFile
from moreh_ap.device.worker_backend import IN_FORCE
from moreh_ap.local import logger
from moreh_ap.protocol.messages.optimizers import (
    BuildOptimizer,
    LoadOptimizer,
    ReleaseOptimizer,
    StepOptimizer,
)
from moreh_ap.protocol.messages.tensors import SavedTensor, StateRef, TensorData
from moreh_ap.session.models.known_optimizers import (
    ELEMENTWISE,
    elementwise_class,
    elementwise_optimizers,
    replaces_a_part,
    steps_elementwise,
)
from moreh_ap.session.models.optimizer_trial import Refused
from moreh_ap.session.models.own_optimizers import OwnStep, own_step_of
from moreh_ap.session.models.parameter_gradients import (
    ParameterList,
    clear_gradients_of,
    expected_will_do,
    group_sizes,
    parameters_of,
)
from moreh_ap.session.models.remote_state import RemoteState, is_entry
from moreh_ap.session.own_process.host_step import step_on_values
from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import OnWorkers, as_argument
from moreh_ap.states import SessionState

_OWN_STEP, REFUSED = "_moreh_own_step", "refused"
"""The attribute of an optimizer with what `own_step_of` has found, and its value where that was nothing."""

SCALING = ("grad_scale", "found_inf")
"""Attributes of an optimizer. Source: `torch.amp.GradScaler.step`."""


def worker_refs(optimizer: Optimizer) -> tuple[tuple[StateRef, ...], ...] | None:
    """Returns the references of the optimizer's parameters, group by group; None if one is not on the workers."""
    groups = []
    for group in optimizer.param_groups:
        refs = []
        for parameter in group["params"]:
            value = parameter._cell.value if isinstance(parameter, VirtualTensor) else None
            if not isinstance(value, OnWorkers) or value.ref.kind != "param":
                return None
            refs.append(value.ref)
        groups.append(tuple(refs))
    return tuple(groups)


class RemoteOptimizer:
    """The controller's handle on one optimizer of the workers.

    Args:
        session: The session of the workers.
        optimizer: The user's optimizer.
        refs: The result of `worker_refs`.
        own: How the optimizer steps on the workers, unless its class is one of `elementwise_optimizers`, or steps by
            the step of one.
    """

    def __init__(
        self,
        session: Session,
        optimizer: Optimizer,
        refs: tuple[tuple[StateRef, ...], ...],
        own: OwnStep | None = None,
    ) -> None:
        self.session, self.refs, self.own = session, refs, own
        self.owner = f"optimizer{session.outbox.new_id()}"
        weakref.finalize(self, session.outbox.release, ReleaseOptimizer(self.owner))
        self._sent = [_hyper_parameters(group) for group in optimizer.param_groups]
        defaults = {key: _plain(value) for key, value in optimizer.defaults.items()}
        if own is None:
            cls = elementwise_class(optimizer)
            accepted = inspect.signature(cls.__init__).parameters
            defaults = {key: value for key, value in defaults.items() if key in accepted}
            session.outbox.post(BuildOptimizer(self.owner, cloudpickle.dumps(cls), refs, defaults))
        else:
            made = (own.pickled_class, refs, defaults, own.attributes, own.needs_whole, own.multiplies)
            session.outbox.post(BuildOptimizer(self.owner, *made))
        self._listed: ParameterList | None = None
        self._group_sizes: list[int] = []
        # The groups' own values outrank the defaults: send them all with the first step.
        self._unsent, self._times_failed = True, 0
        self._adopt_state(optimizer)

    def holds(self, optimizer: Optimizer) -> bool:
        """Returns whether the parameters are those of the last step, and still at the same place."""
        is_same = self._listed is not None and self._listed.is_still(parameters_of(optimizer))
        return is_same and self._group_sizes == group_sizes(optimizer)

    def clear_gradients(self) -> None:
        """Sets the gradients of the last step's parameters to None."""
        if self._listed is not None:
            self._listed.clear_gradients()

    def matches(self, refs: tuple[tuple[StateRef, ...], ...]) -> bool:
        """Returns whether the workers' optimizer still has the same parameters."""
        return refs == self.refs

    def step(self, optimizer: Optimizer) -> None:
        """Runs one step on the workers with the current hyper-parameters; does not wait."""
        self.adopt_new_state(optimizer)
        if self.session.check is not None:
            self.session.check.before_change(parameters_of(optimizer))
        if not self.holds(optimizer):
            self._listed, self._group_sizes = ParameterList(parameters_of(optimizer)), group_sizes(optimizer)
        current = [_hyper_parameters(group) for group in optimizer.param_groups]
        times_failed = self.session.outbox.times_failed  # what a skipped step brought along has not arrived
        if self._unsent or times_failed != self._times_failed:
            changes = dict(enumerate(current))
        else:
            changes = {
                index: {key: value for key, value in new.items() if key not in old or old[key] != value}
                for index, (new, old) in enumerate(zip(current, self._sent))
                if new != old
            }
        self._sent, self._unsent, self._times_failed = current, False, times_failed
        outbox = self.session.outbox
        stepped = outbox.post_soon(StepOptimizer(self.owner, changes, _scaling(optimizer)))
        if self.own is not None:
            self.own.advance(optimizer)
            self._sent = [_hyper_parameters(group) for group in optimizer.param_groups]
        self.session.traffic.step += 1
        if outbox.state.current is SessionState.REPLAYABLE:
            stepped.add_done_callback(
                lambda done: None if done.failed() else outbox.state.enter(SessionState.UNREPLAYABLE)
            )
        if self.session.watch is not None:
            self.session.watch.stepped(optimizer)
        if self.session.check is not None:
            self.session.check.after_step(parameters_of(optimizer))
        if optimizer.state.is_known:  # type: ignore[attr-defined]
            optimizer.state.forget()  # type: ignore[attr-defined]

    def adopt_new_state(self, optimizer: Optimizer) -> None:
        """Sends what the script, `load_state_dict` or a checkpoint has changed of the state to the workers.

        A change in place of a tensor that the workers have is theirs already.
        """
        state = optimizer.state
        if not isinstance(state, RemoteState) or (state.is_known and state.has_changed()):
            self._adopt_state(optimizer)

    def _adopt_state(self, optimizer: Optimizer) -> None:
        parameters = parameters_of(optimizer)
        state: dict[int, dict[str, Any]] = {}
        kept: dict[int, tuple[str, ...]] = {}
        for index, parameter in enumerate(parameters):
            if parameter in optimizer.state:
                entries = optimizer.state[parameter]
                there = [key for key, value in entries.items() if is_entry(value, self.owner, index, key)]
                state[index] = {key: _encode(value) for key, value in entries.items() if key not in there}
                if there:
                    kept[index] = tuple(there)
        self.session.outbox.post(LoadOptimizer(self.owner, state, kept))
        optimizer.state = RemoteState(self.session, self.owner, parameters, self)


def takes_steps_on_workers(optimizer: Optimizer) -> bool:
    """Returns whether steps of an optimizer, or a step that its own calls, run on workers that have its parameters."""
    return "_moreh_remote" in optimizer.__dict__ or isinstance(optimizer, tuple(elementwise_optimizers()))


def stepping_on_workers(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the replacement of a class's `step`: it runs on the workers of a session if they have all parameters.

    Args:
        session: The session.
        original: The class's own method, for parameters that are not on the workers.
    """

    @functools.wraps(original)
    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        backend = IN_FORCE.backend
        if backend is None:  # PyTorch has left this function on a derived class
            return original(optimizer, closure)
        if backend.session is not session:
            return backend.step_on_workers(original)(optimizer, closure)
        loss = _called(closure)  # before it, the model may not have been called
        remote = _remote_as_before(session, optimizer, original)
        if remote is not None:
            remote.step(optimizer)
            return loss
        _bring_state_back(optimizer)
        if not step_on_values(optimizer, original):
            return original(optimizer, None if closure is None else lambda: loss)
        if session.watch is not None:
            session.watch.stepped_here(optimizer)
        return loss

    setattr(step, ELEMENTWISE, True)
    return step


def step_of_own(
    session: Session, optimizer: Optimizer, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Takes a step of an optimizer that is none of `elementwise_optimizers`: on the workers if they can.

    Args:
        session: The session of the workers.
        optimizer: The user's optimizer.
        original: Its class's own method.
        args, kwargs: Arguments of the call after the optimizer.
    """
    given = [one for one in (*args, *kwargs.values()) if one is not None]
    refs = worker_refs(optimizer)
    if refs is None and not (given and all(type(one) is VirtualTensor for one in parameters_of(optimizer))):
        _bring_state_back(optimizer)
        return original(optimizer, *args, **kwargs)
    own = _own_step(optimizer, original)
    if own is not None and given and not (own.takes_closure and len(given) == 1 and callable(given[0])):
        _refuse(optimizer, "is given more than a closure that it calls once, at its beginning")
        own = None
    if own is None:
        return original(optimizer, *args, **kwargs)
    loss = _called(given[0] if given else None)
    refs = refs or worker_refs(optimizer)  # the closure may have been what first called the model
    if refs is None:
        return original(optimizer, lambda: loss)
    _remote_of(session, optimizer, refs, own).step(optimizer)
    return loss


def _called(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _own_step(optimizer: Optimizer, original: Callable[..., Any]) -> OwnStep | None:
    """Returns how an optimizer of another class steps on the workers; None if it steps in the script's process."""
    known = optimizer.__dict__.get(_OWN_STEP)
    if known is REFUSED:
        return None
    try:
        if known is None or known.num_groups != len(optimizer.param_groups):
            known = own_step_of(optimizer, original)
            optimizer.__dict__[_OWN_STEP] = known
        else:
            known.check(optimizer)
    except Refused as refused:
        _refuse(optimizer, str(refused))
        return None
    return known  # type: ignore[no-any-return]


def _refuse(optimizer: Optimizer, reason: str) -> None:
    """Has an optimizer step in the script's process from now on."""
    optimizer.__dict__[_OWN_STEP] = REFUSED
    logger.say(log.own_step_line(type(optimizer).__name__, reason))
    _take_state_back(optimizer)


def _bring_state_back(optimizer: Optimizer) -> None:
    """Reads the state and frees the workers' optimizer, if the parameters have left the workers."""
    if isinstance(optimizer.state, RemoteState) and not any(map(_is_on_workers, parameters_of(optimizer))):
        _take_state_back(optimizer)


def _take_state_back(optimizer: Optimizer) -> None:
    if isinstance(optimizer.state, RemoteState):
        optimizer.state = optimizer.state.read_here()
        optimizer.__dict__.pop("_moreh_remote", None)


def _is_on_workers(parameter: Any) -> bool:
    return isinstance(parameter, VirtualTensor) and isinstance(parameter._cell.value, OnWorkers)


def clearing_on_workers(original: Callable[..., None]) -> Callable[..., None]:
    """Returns the replacement of `Optimizer.zero_grad`: one command clears all gradients of the last step."""

    @functools.wraps(original)
    def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
        remote: RemoteOptimizer | None = optimizer.__dict__.get("_moreh_remote")
        if set_to_none and remote is not None and remote.holds(optimizer):
            remote.clear_gradients()
        elif not set_to_none or not clear_gradients_of(parameters_of(optimizer)):
            with expected_will_do():
                original(optimizer, set_to_none)

    return zero_grad


def step_remotely(session: Session, optimizer: Optimizer) -> None:
    """Runs a step of an optimizer all of whose parameters are on the workers.

    Raises:
        ValueError: A parameter is not on the workers.
    """
    refs = worker_refs(optimizer)
    if refs is None:
        raise ValueError("a parameter of the optimizer is not on the workers")
    _remote_of(session, optimizer, refs).step(optimizer)


def send_state(session: Session, optimizer: Optimizer) -> bool:
    """Sends the state that was put into the optimizer to the workers now, not at its next step.

    Returns:
        False if its steps do not run on the workers, or its parameters are not on the workers yet.
    """
    refs = worker_refs(optimizer)
    if refs is None:
        return False
    own = None
    if not steps_elementwise(optimizer) or replaces_a_part(optimizer):
        step: Any = type(optimizer).step
        own = _own_step(optimizer, getattr(step, SCRIPT_STEP, getattr(step, "__wrapped__", step)))
        if own is None and not isinstance(optimizer, tuple(elementwise_optimizers())):
            return False
    _remote_of(session, optimizer, refs, own).adopt_new_state(optimizer)
    return True


def _remote_as_before(session: Session, optimizer: Optimizer, original: Callable[..., Any]) -> RemoteOptimizer | None:
    """Returns the optimizer of the workers, made or made anew if need be; None if it cannot step there.

    Args:
        session: The session of the workers.
        optimizer: One of a class of `elementwise_optimizers`, or of a class derived from one.
        original: The `step` of the former.
    """
    remote: RemoteOptimizer | None = optimizer.__dict__.get("_moreh_remote")
    if remote is not None and remote.own is None and remote.holds(optimizer):
        return remote
    refs = worker_refs(optimizer)
    if refs is None:
        return None
    if not replaces_a_part(optimizer):
        return _remote_of(session, optimizer, refs)
    own = _own_step(optimizer, original)
    return None if own is None else _remote_of(session, optimizer, refs, own)


def _remote_of(
    session: Session, optimizer: Optimizer, refs: tuple[tuple[StateRef, ...], ...], own: OwnStep | None = None
) -> RemoteOptimizer:
    remote: RemoteOptimizer | None = optimizer.__dict__.get("_moreh_remote")
    if remote is None or not remote.matches(refs):
        remote = RemoteOptimizer(session, optimizer, refs, own)
        optimizer.__dict__["_moreh_remote"] = remote
    return remote


def _hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}


def _scaling(optimizer: Optimizer) -> dict[str, Any]:
    """Returns what `GradScaler` has set for a step that unscales gradients and skips itself (``fused=True``)."""
    found = {name: optimizer.__dict__.get(name) for name in SCALING}
    return {name: as_argument(value) for name, value in found.items() if isinstance(value, Tensor)}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


def _encode(value: Any) -> Any:
    if isinstance(value, VirtualTensor):
        unread = value._cell.value
        if isinstance(unread, InFile):
            return SavedTensor(unread.dtype, tuple(value.shape), unread.sources)
        return TensorData.of(value.host_value())
    return TensorData.of(value, on_device=False) if isinstance(value, Tensor) else value
