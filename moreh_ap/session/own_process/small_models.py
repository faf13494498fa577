"""Which models run in the script's own process: those whose computation takes less time than messages to workers.

Decides by the size of a call, and by the time that the first calls took; of larger models `faster_place.py` says where
they were faster. Must not know how an operation is computed: a model that is here has host tensors
(`device/host_tensors.py`), and its forward is the script's own.

[Note: small models]
A step on workers costs the controller and each worker some milliseconds beside the computation: commands, answers,
collectives. Here an operation costs a few microseconds beside its own time. So a model stays here while a training
step has few floating-point operations. Workers on CPUs have the cores that this process has, so that they win later
than GPUs do. Once a call is larger the model is laid out on the workers, with its values and the optimizer's state, as
at any other first call.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap import log
from moreh_ap.device.host_tensors import HostTensor, hold, let_go, may_be_held
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.values import Here, InFile, Later
from moreh_ap.local import logger
from moreh_ap.local.identity_tables import IdentityTable
from moreh_ap.session.own_process.faster_place import FasterPlace, StepTimes, StepTrial
from moreh_ap.session.own_process.library_modules import call_at_once
from moreh_ap.session.planning.model_profiling import positions_of
from moreh_ap.session.planning.packed_weights import has_packed_weights
from moreh_ap.session.session import Session

MAX_STEP_FLOPS = {"cuda": 1e8, "cpu": 4e8}
"""By the kind of device. A training step of 100 MFLOP takes some 5 ms on one core of 2026. One of 500 MFLOP takes some
20 ms on two cores, and twice as long on two workers with a core each (`docs/benchmarks.md`, small models)."""

MAX_PARTS = 24
"""Modules with parameters, each of which means several operations."""

MAX_FORWARD_S = {"cuda": 4e-3, "cpu": 2e-2}
"""How long a forward may take here, by the kind of device: a loop has more operations than parameters tell."""

_NUM_TIMED = 4  # the first calls, of which the fastest counts: one may import

Call = tuple[tuple[Any, ...], dict[str, Any]]
Route = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class SmallModels:
    """The models that run in this process.

    Args:
        session: Its options say whether models may stay here.
        routes: Takes a route for each module that runs here, until the script moves a module.
    """

    def __init__(self, session: Session, routes: MutableMapping[nn.Module, Route]) -> None:
        self._session, self._routes = session, routes
        self.max_step_flops = MAX_STEP_FLOPS[session.device_type]
        self._max_forward_s = MAX_FORWARD_S[session.device_type]
        self._outgrown: IdentityTable[nn.Module, bool] = IdentityTable()
        self._announced: set[str] = set()
        self.places = FasterPlace(session)

    def take(self, root: nn.Module, call: Call) -> bool:
        """Returns whether `root` runs here from now on.

        Args:
            root: A model all of whose parameters and buffers are on the accelerator.
            call: Positional and keyword arguments of its next call, or of that of a part.
        """
        found = self._place_here(root, call)
        if found is None:
            return False
        tensors = [*root.parameters(), *root.buffers()]
        if not all(isinstance(t, VirtualTensor) and (may_be_held(t) or type(t._cell.value) is InFile) for t in tensors):
            return False
        if not _are_here(_tensors_of(call)):
            return False
        is_small, line = found
        self._run_here(root, is_small=is_small)
        if line not in self._announced:
            self._announced.add(line)
            logger.say(line)
        return True

    def why_here(self, root: nn.Module, call: Call) -> str:
        """Returns the log's line for a model that would run here, by its size or by earlier runs; else ""."""
        found = self._place_here(root, call)
        return "" if found is None else found[1]

    def _place_here(self, root: nn.Module, call: Call) -> tuple[bool, str] | None:
        """Returns whether a model may run here for its size alone, and the line that says why; None: on workers."""
        if not self._session.options.leaves_layout_open or root in self._outgrown or has_packed_weights(root):
            return None
        num_parts = sum(1 for part in root.modules() if any(p is not None for p in part._parameters.values()))
        if num_parts <= MAX_PARTS and step_flops(root, call) <= self.max_step_flops:
            megaflops = step_flops(root, call) / 1e6
            return True, log.own_process_line(type(root).__name__, megaflops, self._session.num_devices)
        times = self.places.known_times(root, call)
        return (False, times.line()) if times is not None and times.is_faster_here else None

    def try_here(self, roots: Sequence[nn.Module], trial: StepTrial) -> None:
        """Runs models, whose values are in this process, here until their steps have been timed, or for good."""
        for root in roots:
            self._run_here(root, is_small=False)
        references = [weakref.ref(root) for root in roots]

        def ended(times: StepTimes) -> None:
            self._session.stop_watching()
            for tried in [reference() for reference in references]:
                if tried is not None and not times.is_faster_here:
                    self._leave(tried)

        trial.ended, self._session.watch = ended, trial

    def _run_here(self, root: nn.Module, *, is_small: bool) -> None:
        for tensor in [*root.parameters(), *root.buffers()]:
            hold(tensor)  # type: ignore[arg-type]
        model = _Model(root, is_small=is_small)
        for part in root.modules():
            self._routes[part] = _Route(self, model, part)

    def let_go(self, root: nn.Module) -> None:
        """Has the values of `root` be ones that can go to the workers."""
        for tensor in [*root.parameters(), *root.buffers()]:
            let_go(tensor)

    def took(self, root: nn.Module, seconds: float) -> None:
        """Has `root` go to the workers if its calls, of which each took at least `seconds`, take too long here."""
        if seconds > self._max_forward_s:
            self._leave(root)

    def _leave(self, root: nn.Module) -> None:
        """Has `root` go to the workers for good."""
        self._outgrown[root] = True
        self.forget(root)

    def forget(self, root: nn.Module) -> None:
        """Has the next call of `root` decide again."""
        for part in root.modules():
            self._routes.pop(part, None)


class _Model:
    """What is known of a model that runs here.

    Args:
        root: The model.
        is_small: Whether it is here for its size, until a call is large or takes long.
    """

    def __init__(self, root: nn.Module, *, is_small: bool) -> None:
        self.root, self.is_small = weakref.ref(root), is_small
        self.flops_per_position = step_flops_per_position(root)
        self.seconds: list[float] = []


class _Route:
    """The route of a part of a model that runs here: notices calls by the script that are large, or take long.

    Args:
        models: Is told that a model has outgrown this process.
        model: The model.
        module: The part.
    """

    def __init__(self, models: SmallModels, model: _Model, module: nn.Module) -> None:
        self._models, self._model, self._module = models, model, weakref.ref(module)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, model = self._module(), self._model
        assert module is not None  # it is being called
        if _INSIDE.a_call:
            return self._call(module, args, kwargs)
        root = model.root()
        if root is None:  # the script has kept a part of a model, which is a model now
            self._models.forget(module)
            return NotImplemented
        if model.is_small and self._is_large((args, kwargs)):
            self._models.forget(root)
            return NotImplemented
        _INSIDE.a_call, began = True, time.perf_counter()
        try:
            result = self._call(module, args, kwargs)
        finally:
            _INSIDE.a_call = False
        if model.is_small and len(model.seconds) < _NUM_TIMED:
            model.seconds.append(time.perf_counter() - began)
            if len(model.seconds) == _NUM_TIMED:
                self._models.took(root, min(model.seconds))
        return result

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = call_at_once(module, args, kwargs)
        return module._call_impl(*args, **kwargs) if result is NotImplemented else result

    def _is_large(self, call: Call) -> bool:
        tensors = _tensors_of(call)
        is_large = self._model.flops_per_position * _positions(tensors) > self._models.max_step_flops
        return is_large or not _are_here(tensors)


class _Inside(threading.local):
    """Whether this thread is in a call of a model that runs here."""

    a_call = False


_INSIDE = _Inside()


def step_flops(root: nn.Module, call: Call) -> float:
    """Returns the floating-point operations of a training step with this call: six for each parameter and position."""
    return step_flops_per_position(root) * _positions(_tensors_of(call))


def step_flops_per_position(root: nn.Module) -> float:
    """Returns the floating-point operations of a training step for one position of one row."""
    return 6.0 * sum(parameter.numel() for parameter in root.parameters())


def _tensors_of(call: Call) -> list[Tensor]:
    args, kwargs = call
    is_flat = not kwargs and all(isinstance(one, Tensor) for one in args)
    return [leaf for leaf in (args if is_flat else tree_leaves(call)) if isinstance(leaf, Tensor)]


def _positions(tensors: list[Tensor]) -> int:
    """Returns the positions of all rows: of sequences, or the pixels of pictures."""
    with torch._C.DisableTorchFunction():
        tensors = [tensor for tensor in tensors if tensor.dim() > 0]
        return tensors[0].shape[0] * positions_of(tensors) if tensors else 1


def _are_here(tensors: list[Tensor]) -> bool:
    """Returns whether no argument is on the workers, where another model left it."""
    virtual = [one for one in tensors if isinstance(one, VirtualTensor) and type(one) is not HostTensor]
    return all(isinstance(tensor._cell.value, (Here, InFile, Later)) for tensor in virtual)
