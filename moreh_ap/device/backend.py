"""What the virtual device needs of the workers behind it, as an interface.

`moreh_ap.session.backend` implements it and `moreh_ap.accelerator` joins the two: nothing in this package imports the
session. A backend is in force between `put_in_force` and `remove`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from moreh_ap.protocol.messages.devices import DeviceInfo


class DeviceGenerator(Protocol):
    """The random number generator of the device: a seed, and a state that can be kept and put back."""

    def manual_seed(self, seed: int) -> None: ...

    def initial_seed(self) -> int: ...

    def state(self) -> bytes: ...

    def set_state(self, state: bytes) -> None: ...


class PlaceInOrder(Protocol):
    """A place in the ordered stream of commands, known to be reached or not."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...

    def add_done_callback(self, callback: Callable[[Any], object]) -> None: ...


class WorkerBackend(Protocol):
    """Runs modules, optimizers and gradient operations on the workers.

    Methods that stand in for a function of PyTorch answer NotImplemented where the function has to run in the
    controller as it is.
    """

    @property
    def generator(self) -> DeviceGenerator: ...

    @property
    def num_devices(self) -> int: ...

    def devices(self) -> list[DeviceInfo]:
        """The physical devices, in rank order. Waits the first time."""

    def memory(self, *, reset_peak: bool = False, empty_cache: bool = False) -> dict[str, int]:
        """Bytes over all devices: ``allocated``, ``peak``, ``free``, ``total``. Waits."""

    def synchronize(self) -> None:
        """Wait until the workers have executed every command; raise the first error not raised yet."""

    def mark_place(self) -> PlaceInOrder:
        """The present place in the stream of commands. Does not wait."""

    @property
    def routes(self) -> Mapping[nn.Module, Callable[[tuple[Any, ...], dict[str, Any]], Any]]:
        """How to call modules that the workers are known to have; as `call_module`, but quicker."""

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a module's call on the workers; NotImplemented if the call belongs in the controller."""

    def note_moved(self, root: nn.Module) -> None:
        """The script has moved `root` to or from the accelerator."""

    def note_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """The script has set an attribute of a module."""

    def optimizer_classes(self) -> Sequence[type[Optimizer]]:
        """Classes of optimizers whose `step` the workers can take."""

    def step_on_workers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in for `original`, the `step` of one of these classes."""

    def zero_grad_on_workers(self, original: Callable[..., None]) -> Callable[..., None]:
        """What stands in for `original`, which is `torch.optim.Optimizer.zero_grad`."""

    def clip_on_workers(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """What stands in for `original`, which is `torch.nn.utils.clip_grad_norm_`."""

    def clearing_gradients(self) -> AbstractContextManager[None]:
        """Inside, gradients are read only to be cleared: reading them need not wait for the workers."""

    def total_norm(self, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Stands in for `torch.nn.utils.get_total_norm`."""

    def clip_gradients(self, parameters: list[Tensor], max_norm: float, total_norm: Tensor) -> Any:
        """Stands in for `torch.nn.utils.clip_grads_with_norm_`."""

    def gradients(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Stands in for `torch.autograd.grad`."""

    def backward(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Stands in for `torch.autograd.backward`."""

    def backward_of_tensor(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Stands in for `torch.Tensor.backward`."""


class _InForce:
    """The backend of this process; None while "cuda" has its ordinary meaning."""

    backend: WorkerBackend | None = None


IN_FORCE = _InForce()
