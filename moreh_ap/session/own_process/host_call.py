"""Calls of a model whose values are in the script's own process: on ordinary tensors, one operation for the script.

Decides when a call on ordinary tensors gives what the operations on accelerator tensors give; `graph_tie.py` joins the
graphs of both, `stand_ins.py` puts the ordinary tensors into the model. Must not know which models run in this process.

[Note: calls on ordinary tensors]
Computed one by one, each operation of a forward and of its backward takes its way through Python. A call on ordinary
tensors has them in the places of parameters and buffers while it runs, and its result becomes accelerator tensors. This
is the same if nothing but the result leaves the call, and nothing in it asks for the accelerator. So the operations
are computed one by one on accelerator tensors

- in the first call of a kind, which shows whether all tensors of the result are on the accelerator;
- in a backward, and where the script has blocks computed again in one;
- if hooks see tensors inside of the call, if a forward writes variables outside of the model, or if an attribute has
  accelerator tensors;
- once more, from the same random numbers and buffers, if the call raised an error (``device="cuda"`` in a forward) or
  left a tensor in an attribute. After that the model runs on accelerator tensors for good.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from moreh_ap.device.function_mode import without_redirection
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.protocol.rng_state import set_state_of_host, state_of_host
from moreh_ap.protocol.script_code.script_globals import written_by
from moreh_ap.session.module_contents import ModuleContents
from moreh_ap.session.own_process.attribute_watch import AttributeWatch, Parts
from moreh_ap.session.own_process.graph_tie import tie
from moreh_ap.session.own_process.stand_ins import PLAIN, StandIns, stand_ins_for


class HostCalls:
    """Runs calls of one model, and of its parts, on ordinary tensors where that is the same.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._is_refused = any(True for _ in written_by(root))
        self._tried: dict[Any, bool] = {}  # kinds of calls, and whether one was through on ordinary tensors
        self._attributes = AttributeWatch()
        self._lock = threading.RLock()  # while stand-ins are in place, no other thread may use the model

    @property
    def are_on_ordinary_tensors(self) -> bool:
        """Whether a call on ordinary tensors was through, and none since then that has to run otherwise."""
        return not self._is_refused and any(self._tried.values())

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of ``module(*args, **kwargs)``, with its tensors on the accelerator.

        Raises:
            Exception: Whatever the forward raises on accelerator tensors.
        """
        if self._is_refused or _is_special():
            return module._call_impl(*args, **kwargs)
        with self._lock:
            return self._run(module, args, kwargs)

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = id(module), module.training, torch.is_grad_enabled(), (*map(type, args),), (*kwargs,)
        is_tried = self._tried.get(kind)
        if is_tried is None:
            result = module._call_impl(*args, **kwargs)
            if all(_has_place(leaf, VirtualTensor) for leaf in tree_leaves(result)):
                self._tried[kind] = False
            return result
        with torch._C.DisableTorchFunction():
            parts = self._attributes.parts_of(module)
            stand_ins = None if parts is None else stand_ins_for(parts, args, kwargs)
        if parts is None or stand_ins is None:
            return module._call_impl(*args, **kwargs)
        start = _Start(parts, stand_ins, is_first=not is_tried)
        try:
            with stand_ins.in_place(), without_redirection():
                result = module._call_impl(*stand_ins.args, **stand_ins.kwargs)
            leaves, spec = ([result], None) if type(result) is Tensor else tree_flatten(result)
            with torch._C.DisableTorchFunction():
                is_same = self._is_same(parts, stand_ins, leaves, is_first=not is_tried)
        except Exception:  # whatever the script's code raises: the call on accelerator tensors tells what is wrong
            is_same = False
        if not is_same:
            start.put_back()
            result = module._call_impl(*args, **kwargs)
            self._is_refused = True  # unless this has raised an error too: then it is the script's
            return result
        self._tried[kind] = True
        placed = tie(leaves, stand_ins.leaves, stand_ins.accelerator_leaves, lambda: self._again(stand_ins))
        return placed[0] if spec is None else tree_unflatten(placed, spec)

    @contextmanager
    def _again(self, stand_ins: StandIns) -> Iterator[None]:
        """Has the stand-ins in place once more, for blocks that a backward computes again."""
        with self._lock, stand_ins.in_place():
            yield

    def _is_same(self, parts: Parts, stand_ins: StandIns, leaves: list[Any], *, is_first: bool) -> bool:
        """Returns whether nothing but the result has left a call."""
        if stand_ins.were_replaced or stand_ins.were_filled() or not all(_has_place(leaf, Tensor) for leaf in leaves):
            return False
        return self._attributes.have_no_new_tensor(parts) and not (is_first and stand_ins.share_memory_with(leaves))


def _is_special() -> bool:
    """Returns whether each operation has to be seen: to be cast, or to be computed again in a backward."""
    is_in_backward = torch._C._current_graph_task_id() != -1
    saves = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # checkpointing by the script
    is_cast = torch.is_autocast_enabled("cuda") or torch.is_inference_mode_enabled()
    return is_in_backward or saves or is_cast or torch_modules._has_any_global_hook()


class _Start:
    """What a call starts from: random streams, buffers, attributes and, in the first call of a kind, all its tensors.

    Args:
        parts: The module and those in it.
        stand_ins: The ordinary tensors of the call.
        is_first: Whether no such call was through.
    """

    def __init__(self, parts: Parts, stand_ins: StandIns, *, is_first: bool) -> None:
        self._stream = torch.default_generator.get_state()
        self._host = state_of_host() if is_first else None
        with torch._C.DisableTorchFunction():
            kept = stand_ins.all() if is_first else stand_ins.buffers
            self._values = [(tensor, tensor.detach().clone()) for tensor in kept]
        self._contents = ModuleContents(part for part, _ in parts)

    def put_back(self) -> None:
        """Has everything be as it was."""
        torch.default_generator.set_state(self._stream)
        if self._host is not None:
            set_state_of_host(self._host)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)
        self._contents.put_back()


def _has_place(leaf: Any, kind: type[Tensor]) -> bool:
    """Returns whether a leaf of a result is of this class of tensors, on the accelerator if it can be, or no tensor."""
    if type(leaf) is kind:
        return kind is Tensor or leaf.is_cuda
    return isinstance(leaf, PLAIN)
