"""The interface to the workers that the virtual device needs.

`moreh_ap.session.session_backend` implements it and `moreh_ap.accelerator` joins the two: nothing in this package
imports the session. `IN_FORCE` holds the present backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from moreh_ap.local.identity_tables import IdentityTable
from moreh_ap.protocol.messages.devices import DeviceInfo


class DeviceGenerator(Protocol):
    """The random number generator of the device: a seed, and a state that can be saved and restored."""

    def manual_seed(self, seed: int) -> None: ...

    def initial_seed(self) -> int: ...

    def state(self) -> bytes: ...

    def set_state(self, state: bytes) -> None: ...


class PlaceInOrder(Protocol):
    """A position in the ordered stream of commands, with whether the workers have reached it."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...

    def add_done_callback(self, callback: Callable[[Any], object]) -> None: ...


class WorkerBackend(Protocol):
    """Runs modules, optimizers and gradient operations on the workers.

    Methods that replace a function of PyTorch return NotImplemented if the original function has to run in the
    controller.
    """

    session: object
    """Of which accelerator it is: functions that PyTorch keeps may be of an earlier one."""

    @property
    def generator(self) -> DeviceGenerator: ...

    @property
    def num_devices(self) -> int: ...

    def devices(self) -> list[DeviceInfo]:
        """Returns the physical devices, in rank order. Waits the first time."""

    def memory(self, *, reset_peak: bool = False) -> dict[str, int]:
        """Returns bytes summed over all devices: ``allocated``, ``peak``, ``free``, ``total``. Waits."""

    def empty_cache(self) -> None:
        """Has every device give its cached memory back once it has run the commands of before. Does not wait."""

    def synchronize(self) -> None:
        """Waits until the workers have run every command; raises the first error not raised yet."""

    def mark_place(self) -> PlaceInOrder:
        """Returns the present position in the stream of commands. Does not wait."""

    @property
    def routes(self) -> IdentityTable[nn.Module, Callable[[tuple[Any, ...], dict[str, Any]], Any]]:
        """Returns the routes to modules that the workers are known to have: faster than `call_module`."""

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a module's call on the workers; NotImplemented if the controller has to run it."""

    def note_moved(self, root: nn.Module) -> None:
        """Called when the script has moved `root` to or from the accelerator."""

    def note_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Called when the script has set an attribute of a module."""

    def note_deleted(self, module: nn.Module) -> None:
        """Called when the script has deleted an attribute of a module."""

    def note_compiled(self, module: nn.Module) -> None:
        """Called when the script has compiled a module, or has compiled it with other options than before."""

    def optimizer_classes(self) -> Sequence[type[Optimizer]]:
        """Returns the classes of optimizers whose `step` can run on the workers."""

    def step_on_workers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the replacement of `original`, the `step` of one of these classes."""

    def step_of_own(self, optimizer: Optimizer, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Takes a step of an optimizer of another class, on the workers if they can, else by its own method."""

    def zero_grad_on_workers(self, original: Callable[..., None]) -> Callable[..., None]:
        """Returns the replacement of `original`, `torch.optim.Optimizer.zero_grad`."""

    def clip_on_workers(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns the replacement of `original`, `torch.nn.utils.clip_grad_norm_`."""

    def clear_gradients(self, parameters: list[Tensor]) -> bool:
        """Sets gradients that the workers have to None; False if they do not have all, and nothing was done."""

    def clearing_gradients(self) -> AbstractContextManager[None]:
        """Inside, gradients are read only to be cleared, so reading them does not wait for the workers."""

    def total_norm(self, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Replaces `torch.nn.utils.get_total_norm`."""

    def clip_gradients(self, parameters: list[Tensor], max_norm: float, total_norm: Tensor) -> Any:
        """Replaces `torch.nn.utils.clip_grads_with_norm_`."""

    def unscale_gradients(self, parameters: list[Tensor], found: Tensor, inverse_scale: Tensor) -> bool:
        """Unscales gradients on the workers; they note in `found` whether one is not finite. False: it did nothing."""

    def gradients(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Replaces `torch.autograd.grad`."""

    def backward(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Replaces `torch.autograd.backward`."""

    def backward_of_tensor(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Replaces `torch.Tensor.backward`."""


class _InForce:
    """The backend of this process; None while "cuda" has its ordinary meaning."""

    backend: WorkerBackend | None = None


IN_FORCE = _InForce()
