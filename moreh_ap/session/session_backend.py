"""The session's implementation of the interface that the virtual device needs (`device.worker_backend.WorkerBackend`).

Decides nothing: each method calls the module that does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.optim import Optimizer

from moreh_ap.local.identity_tables import IdentityTable
from moreh_ap.protocol.messages.devices import DeviceInfo, ReportMemory
from moreh_ap.protocol.messages.stream import Synchronize
from moreh_ap.session import script_line
from moreh_ap.session.calls import autograd_api, clipping
from moreh_ap.session.calls.answer_check import MakesMembers
from moreh_ap.session.calls.extended_call import ExtendedCalls, call_remotely
from moreh_ap.session.model_registry import ModelRegistry, Route
from moreh_ap.session.models.known_optimizers import elementwise_optimizers
from moreh_ap.session.models.parameter_gradients import clear_gradients_of, expected_will_do
from moreh_ap.session.models.remote_optimizer import clearing_on_workers, step_of_own, stepping_on_workers
from moreh_ap.session.models.script_hooks import RunsInScriptOnly, replaying
from moreh_ap.session.outbox import Posted
from moreh_ap.session.rng_streams import AcceleratorGenerator
from moreh_ap.session.session import Session


class SessionBackend:
    """Passes requests of the device to the modules of a session.

    Args:
        session: The workers and the order of their commands.
        registry: The models on the workers.
    """

    def __init__(self, session: Session, registry: ModelRegistry) -> None:
        self.session: object = session
        self._session, self._registry = session, registry
        session.extensions = ExtendedCalls()

    @property
    def generator(self) -> AcceleratorGenerator:
        return self._session.generator

    @property
    def num_devices(self) -> int:
        return self._session.num_devices

    def devices(self) -> list[DeviceInfo]:
        return self._session.devices()

    def memory(self, *, reset_peak: bool = False) -> dict[str, int]:
        return self._session.memory(reset_peak=reset_peak)

    def empty_cache(self) -> None:
        self._session.outbox.post_soon(ReportMemory(empty_cache=True))

    def synchronize(self) -> None:
        self._session.synchronize()

    def mark_place(self) -> Posted:
        return self._session.outbox.submit(Synchronize())

    # -- modules ---------------------------------------------------------------------------------------------------

    @property
    def routes(self) -> IdentityTable[nn.Module, Route]:
        return self._registry.routes

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch_modules._has_any_global_hook():
            self._warn_of_global_hooks(module)
            return NotImplemented
        found, hooks_done = self._registry.find(module, args, kwargs), 0
        while found is not None:
            try:
                return call_remotely(*found, args, kwargs, hooks_done)
            except RunsInScriptOnly as hook:
                found, hooks_done = self._registry.find(module, args, kwargs), hook.done
            except MakesMembers:
                return self._registry.call_here(found[0], module, args, kwargs)
        return NotImplemented

    def _warn_of_global_hooks(self, module: nn.Module) -> None:
        """Says that a training call is computed here: a hook on all modules is given what each module computes."""
        parameter = next(iter(module.parameters()), None)
        is_here = parameter is not None and parameter.is_cuda and torch.is_grad_enabled()
        if is_here and not self._session.has_told_of_global_hooks:
            self._session.has_told_of_global_hooks = True
            script_line.warn(
                f"{type(module).__name__} is computed in the script's own process, operation by operation, as long as "
                "there is a hook on all modules (register_module_forward_hook, FlopCounterMode). Hooks on the modules "
                "of a model leave it on the workers. See: docs/limits.md#models"
            )

    def note_moved(self, root: nn.Module) -> None:
        self._registry.note_moved(root)

    def note_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        self._registry.note_attribute(module, name, value)

    def note_deleted(self, module: nn.Module) -> None:
        if not replaying():
            self._registry.note_structure(module)

    def note_compiled(self, module: nn.Module) -> None:
        self._registry.note_structure(module)

    # -- optimizers and gradients ----------------------------------------------------------------------------------

    def optimizer_classes(self) -> Sequence[type[Optimizer]]:
        return elementwise_optimizers()

    def step_on_workers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return stepping_on_workers(self._session, original)

    def step_of_own(self, optimizer: Optimizer, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        return step_of_own(self._session, optimizer, original, args, kwargs)

    def zero_grad_on_workers(self, original: Callable[..., None]) -> Callable[..., None]:
        return clearing_on_workers(original)

    def clip_on_workers(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return clipping.clipping_on_workers(self._session, original)

    def clear_gradients(self, parameters: list[Tensor]) -> bool:
        return clear_gradients_of(parameters)

    def clearing_gradients(self) -> AbstractContextManager[None]:
        return expected_will_do()

    def total_norm(self, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        norm = clipping.norm_on_workers(tensors, *args, **kwargs)
        return NotImplemented if norm is None else norm

    def clip_gradients(self, parameters: list[Tensor], max_norm: float, total_norm: Tensor) -> Any:
        clipped = clipping.clip_on_workers(parameters, max_norm, total_norm)
        return None if clipped else NotImplemented

    def unscale_gradients(self, parameters: list[Tensor], found: Tensor, inverse_scale: Tensor) -> bool:
        return clipping.unscale_on_workers(self._session, parameters, found, inverse_scale)

    def gradients(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        return autograd_api.gradients(func, args, kwargs)

    def backward(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        return autograd_api.backward(func, args, kwargs)

    def backward_of_tensor(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        return autograd_api.backward_of_tensor(func, args, kwargs)
