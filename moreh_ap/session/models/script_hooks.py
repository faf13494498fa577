"""Hooks of the script on modules of a model on the workers.

Decides which hooks are the script's, which hooks the workers run, and when each runs in the controller. The
reason for running twice is in `protocol/hook_records.py`, [Note: hooks run twice].
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import cloudpickle
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import UnsupportedError
from moreh_ap.plan import Plan
from moreh_ap.protocol.added_members import is_of_library
from moreh_ap.protocol.hook_records import QuietHook, Report, ReportedHook, attributes_in
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.protocol.module_attributes import HeldAttributes
from moreh_ap.protocol.rng_state import host_untouched
from moreh_ap.session.models.replayed_moments import ReplayedMoments
from moreh_ap.session.models.signatures import Structure
from moreh_ap.session.state_tensors import StateHolder

_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")

_replaying: ContextVar[bool] = ContextVar("replaying", default=False)


def replaying() -> bool:
    """Whether hooks run that have run on the workers before: the workers already have the attributes that these set."""
    return _replaying.get()


class HookedModel(Protocol):
    """A model whose hooks run in the controller."""

    @property
    def owner(self) -> str: ...

    @property
    def holder(self) -> StateHolder: ...

    def path_of(self, module: nn.Module) -> str: ...

    def note_replayed(self) -> None: ...

    def take_attributes(self, attributes: dict[str, Any]) -> None: ...


class HookedCall(Protocol):
    """A call whose hooks run in the controller."""

    @property
    def model(self) -> HookedModel: ...

    @property
    def structure(self) -> Structure | None: ...

    def watch(self, indices: list[int], watcher: Callable[[dict[int, Tensor]], None]) -> object: ...


@dataclass(frozen=True)
class _Hook:
    """One hook: its module, the name of the module's dict of hooks, its key in that dict, and the function."""

    module: nn.Module
    where: str
    key: int
    run: Callable[..., Any]


class RunsInScriptOnly(Exception):
    """A hook needs an object of the script's process (a run of wandb): the call is repeated without it on the workers.

    Args:
        done: The number of hooks that have run in the controller.
        key: The key of the hook.
    """

    def __init__(self, done: int, key: int) -> None:
        super().__init__(done, key)
        self.done, self.key = done, key


class ScriptHooks:
    """The hooks of the script on one model, numbered.

    Args:
        root: The model.
        plan: Its plan.
        silent: The plan is on trial: hooks run on the workers only.
        kept_here: Keys of hooks that run in the controller only: they raised on the workers alone.

    Raises:
        UnsupportedError: The model has hooks that cannot run under this plan, or hooks of an unsupported kind.
    """

    def __init__(
        self, root: nn.Module, plan: Plan, silent: bool = False, kept_here: Collection[int] = frozenset()
    ) -> None:
        self._root, self.is_silent = root, silent
        self._hooks = [
            _Hook(submodule, where, key, hook)
            for submodule in root.modules()
            for where in (*_FORWARD, *_BACKWARD)
            for key, hook in getattr(submodule, where).items()
            if not is_of_library(hook)
        ]
        self._sent = {hook.key for hook in self._hooks if hook.key not in kept_here and _can_be_sent(hook.run)}
        # Backward hooks get the gradients of the tensors that a forward hook here was given.
        self._differentiated = list({id(hook.module): hook.module for hook in self._of(_BACKWARD)}.values())
        self.any = bool(self._hooks)
        self._has_answers = plan.micro_batches == 1  # only then workers answer which attributes a forward has set
        self.attributes: set[str] = set()
        """Names of attributes that hooks set, as on the workers."""
        self.buffers: set[str] = set()
        """Names of buffers that hooks replace, as on the workers, which have their values."""
        self._leaving_buffers: set[int] = set()
        """Keys of hooks that have run here and have written into no buffer of their module."""
        if self._hooks:
            self._refuse(plan)

    def _of(self, kinds: tuple[str, ...]) -> list[_Hook]:
        return [hook for hook in self._hooks if hook.where in kinds]

    def _refuse(self, plan: Plan) -> None:
        if plan.tensor * plan.pipeline > 1:
            hook = self._hooks[0]
            raise UnsupportedError(
                f"{_name(hook.run)} is a hook on a {type(hook.module).__name__}, which under plan={str(plan)!r} no "
                "worker has as a whole.",
                allowed="Hooks under plans with replicate and shard alone.",
                fix=f'torch.moreh.option.enable_advanced_parallelization(plan="shard={plan.num_devices}")',
            )
        if any(module._is_full_backward_hook is False for module in self._differentiated):
            raise UnsupportedError(
                "register_backward_hook: the hook would see gradients of a part of the batch.",
                allowed="register_full_backward_hook, which PyTorch recommends instead.",
                fix="module.register_full_backward_hook(hook)",
            )

    # -- for the workers ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Inside, the hooks are replaced by the workers' versions of them."""
        added: list[tuple[nn.Module, int]] = []
        for number, hook in enumerate(self._hooks):
            sent = hook.run if hook.key in self._sent else None
            stands_for = ReportedHook(number, sent) if hook.where in _FORWARD else QuietHook(sent)
            getattr(hook.module, hook.where)[hook.key] = stands_for
        for number, module in enumerate(self._differentiated, start=len(self._hooks)):
            handle = module.register_forward_hook(ReportedHook(number, None))
            added.append((module, handle.id))
        try:
            yield
        finally:
            for module, key in added:
                del module._forward_hooks[key]
            for hook in self._hooks:
                getattr(hook.module, hook.where)[hook.key] = hook.run

    # -- in the controller -----------------------------------------------------------------------------------------

    def run(self, call: HookedCall, tree: Any, report: Report, num_leaves: int, done: int = 0) -> Any:
        """Run the forward hooks of a call, and set the attributes that it set; returns the module's result.

        Args:
            call: The call.
            tree: The nesting of the report.
            report: The result, and the records of hooks and attributes.
            num_leaves: The number of leaves of the report.
            done: The number of hooks that ran already, in a call that was repeated.

        Raises:
            Exception: A hook raised it, and it ends the forward.
            UnsupportedError: A hook failed on the workers.
            RunsInScriptOnly: A hook raised on the workers and not in the controller.
        """
        if self.is_silent:
            return report.result
        order = iter(tree_unflatten(list(range(num_leaves)), tree).seen)
        ran = {number for seen in report.seen for number in seen if number < len(self._hooks)}
        are_sent = all(self._hooks[number].key in self._sent for number in ran)
        before = HeldAttributes(self._root) if ran and are_sent and self._has_answers else None
        moments = ReplayedMoments(self._root, call.model, report.attributes)
        token, has_returned = _replaying.set(True), False
        try:
            for position, seen in enumerate(report.seen):
                ((number, given),), indices = seen.items(), next(order)
                moments.come_to(position)
                if number < len(self._hooks):
                    if position >= done:
                        has_returned = self._run(self._hooks[number], given, call.model)
                else:
                    module = self._differentiated[number - len(self._hooks)]
                    self._watch(call, module, given, indices[number])
        finally:
            _replaying.reset(token)
            moments.end()
        if before is not None and call.structure is not None:  # what the forward did after its hooks counts
            before.put_back(but={*attributes_in(report.attributes, passing=False), *call.structure.left_out})
        call.model.note_replayed()
        if report.ended_by is not None:
            hook = self._hooks[next(iter(report.seen[-1]))]
            if has_returned:
                raise _refused(hook, f"returns a value and raises {report.ended_by} in workers.")
            self._refuse_to_call_again(hook, report.ended_by)
            raise RunsInScriptOnly(len(report.seen), hook.key)
        call.model.take_attributes(moments.final)
        return report.result

    def _refuse_to_call_again(self, hook: _Hook, raised: str) -> None:
        """Raises if the forward, which a hook ended half-way, may have changed buffers already."""
        for submodule in self._root.modules():
            if submodule.training and set(submodule._buffers) - submodule._non_persistent_buffers_set:
                raise UnsupportedError(
                    f"{_name(hook.run)}, a hook, raised {raised} in a worker and not in the script, in a forward that "
                    f"changes buffers of a {type(submodule).__name__}.",
                    allowed="A first call in evaluation mode, in which the hook is found to run in the script alone.",
                    fix="model.eval(); model(batch); model.train()  # once, after the hook is registered",
                )

    def _run(self, hook: _Hook, given: tuple[Any, ...], model: HookedModel) -> bool:
        """Runs a hook as the script put it on a module; returns whether it returned a value."""
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        versions = [_version_of(tensor) for tensor in tensors]
        is_sent, buffers = hook.key in self._sent, hook.module._buffers
        before = dict(buffers)
        if is_sent and hook.key not in self._leaving_buffers:
            with torch.inference_mode(False):  # what is written into a tensor of inference mode is not counted
                copies = {name: one.detach().clone() for name, one in buffers.items() if _may_be_written_into(one)}
            buffers.update(copies)
        begun = {name: (one, _version_of(one)) for name, one in buffers.items() if one is not None}
        with contextlib.ExitStack() as stack:
            if is_sent:  # its random numbers were drawn on the workers
                stack.enter_context(torch.random.fork_rng(devices=[]))
                stack.enter_context(host_untouched())
            returned = hook.run(hook.module, *given)
        if is_sent:  # it began here with what the workers have after it, which counts
            has_written = any(_version_of(one) != version for one, version in begun.values())
            if not has_written:
                self._leaving_buffers.add(hook.key)
            elif hook.key in self._leaving_buffers:
                raise UnsupportedError(
                    f"{_name(hook.run)}, a hook on a {type(hook.module).__name__}, writes into a buffer, and did not "
                    "in its first run.",
                    allowed="Hooks that write into buffers each time, or put other tensors in their place.",
                    fix="module.total = module.total + value  # instead of module.total += value",
                )
            for name, one in before.items():
                is_new = name not in begun or buffers.get(name) is not begun[name][0]
                is_parameter = is_new and isinstance(one, nn.Parameter) and buffers.get(name) is not None
                buffers[name] = _on_workers(model, hook.module, name) if is_parameter else one
        changed = versions != [_version_of(tensor) for tensor in tensors]
        if changed:
            raise _refused(hook, "changes its tensors in place.")
        if returned is not None and not is_sent:
            raise _refused(hook, "returns a value and cannot run in workers.")
        return returned is not None

    def _watch(self, call: HookedCall, module: nn.Module, given: tuple[Any, ...], indices: tuple[Any, ...]) -> None:
        """Runs the backward hooks of `module` with the gradients of its inputs and outputs in this call."""
        inputs, outputs = (_top_level(given[0], indices[0]), _top_level(given[1], indices[1]))
        wanted = [*inputs, *outputs]

        def run(gradients: dict[int, Tensor]) -> None:
            found = [None if index is None else gradients.get(index) for index in wanted]
            grad_inputs, grad_outputs = tuple(found[: len(inputs)]), tuple(found[len(inputs) :])
            if all(gradient is None for gradient in grad_outputs):
                return
            for pre_hook in module._backward_pre_hooks.values():
                if not is_of_library(pre_hook):
                    pre_hook(module, grad_outputs)
            for hook in module._backward_hooks.values():
                if not is_of_library(hook):
                    hook(module, grad_inputs, grad_outputs)

        call.watch([index for index in wanted if index is not None], run)


def _version_of(tensor: Tensor) -> int | None:
    """Returns how often a tensor was written into, None for one of inference mode, which PyTorch does not count."""
    return None if tensor.is_inference() else tensor._version


def _refused(hook: _Hook, does: str) -> UnsupportedError:
    return UnsupportedError(
        f"{_name(hook.run)}, a hook on a {type(hook.module).__name__}, {does}",
        allowed="Hooks that return the changed tensor, can be pickled, and need nothing of this process.",
        fix="return output * 2  # instead of output.mul_(2)",
    )


def _may_be_written_into(buffer: Tensor | None) -> TypeGuard[Tensor]:
    """Returns whether a buffer of a module may be one that a hook counts in."""
    return buffer is not None and not isinstance(buffer, nn.Parameter) and buffer.grad_fn is None


def _on_workers(model: HookedModel, module: nn.Module, name: str) -> Tensor:
    """Returns a buffer of a module as the workers have it."""
    path, own = f"{model.path_of(module)}.{name}".lstrip("."), module._buffers[name]
    assert own is not None
    return model.holder.handle(StateRef(model.owner, "buffer", path), own.detach())


def _top_level(given: Any, indices: Any) -> list[int | None]:
    """Returns the indices of the tensors among positional arguments, or in a result, as backward hooks count them."""
    pairs = list(zip(given, indices, strict=True)) if isinstance(given, tuple) else [(given, indices)]
    return [index if isinstance(value, Tensor) and value.requires_grad else None for value, index in pairs]


def has_hooks_of_script(root: nn.Module) -> bool:
    """Returns whether the script has put a hook on the module or a submodule."""
    kinds = (*_FORWARD, *_BACKWARD)
    hooks = (hook for submodule in root.modules() for kind in kinds for hook in getattr(submodule, kind).values())
    return not all(map(is_of_library, hooks))


def _name(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _can_be_sent(hook: Any) -> bool:
    try:
        _Trial(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL).dump(hook)
    except Exception:  # of any class: objects raise errors of their own when they cannot be pickled
        return False
    return True


class _Trial(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
    """Pickles a hook without the tensors and modules that it refers to."""

    def persistent_id(self, obj: Any) -> Any:
        return "left out" if isinstance(obj, (torch.Tensor, nn.Module, VirtualTensor)) else None
