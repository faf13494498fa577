"""`torch.autograd.grad` and `backward(inputs=...)` for graphs that contain calls on the workers.

Decides how the gradients of parameters and of a call's outputs are found, though these are not tensors of the
controller's graph. Gradients of parameters that were not asked for keep their values. Must not know how a
backward is carried out.

[Note: how]
The gradient of a parameter on the workers is requested through the anchor of its model: autograd then visits the
model's calls. The workers set the earlier gradients aside, so the gradients that a backward leaves are the answer, and
put the earlier ones back afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import UnsupportedError
from moreh_ap.protocol.messages.calls import TakeGradients
from moreh_ap.session.models.parameter_gradients import separate_gradients
from moreh_ap.session.models.remote_model import RemoteModel
from moreh_ap.session.outbox import Posted
from moreh_ap.session.state_tensors import ModelState, OnWorkers


class Apart:
    """Gradients of parameters from one backward, kept apart from the gradients that were accumulated before.

    Args:
        wanted: The parameters of each model whose gradients are requested.
    """

    def __init__(self, wanted: dict[RemoteModel, list[str]]) -> None:
        self._wanted = wanted
        self._replies: dict[RemoteModel, Posted] = {}
        self._with_graph: dict[tuple[RemoteModel, str], Tensor] = {}

    def asked(self, model: RemoteModel) -> list[str]:
        """Returns the parameters of a model whose gradients are requested."""
        return self._wanted.get(model, [])

    def wants_of(self, root: nn.Module) -> bool:
        """Returns whether gradients of parameters of this module are requested."""
        return any(model.root is root for model in self._wanted)

    def add(self, model: RemoteModel, gradients: dict[str, Tensor | None]) -> None:
        """Records gradients that have a graph; the gradients of several calls add up."""
        for name, gradient in gradients.items():
            if gradient is not None:
                before = self._with_graph.get((model, name))
                self._with_graph[model, name] = gradient if before is None else before + gradient

    def after_backward(self, model: RemoteModel, reply: Posted) -> None:
        """Records that a backward of a call of `model` was sent."""
        self._replies[model] = reply

    def take(self) -> dict[tuple[RemoteModel, str], Tensor]:
        """Returns the requested gradients that exist; the workers drop all others."""
        taken, self._with_graph = self._with_graph, {}
        for model, reply in self._replies.items():
            names = self.asked(model)
            present = model.gradients.decode(reply) if names else ()
            taken.update({(model, name): model.promise_like(name) for name in names if name in present})
            refs = {name: gradient._cell.value.ref for (of, name), gradient in taken.items() if of is model}  # type: ignore[attr-defined]
            model.session.outbox.post(TakeGradients(model.owner, refs))
        self._replies.clear()
        return taken

    def drop(self) -> None:
        """Has the workers drop all gradients that were not taken."""
        self._wanted = {}
        self.take()


@contextlib.contextmanager
def _kept_apart(wanted: dict[RemoteModel, list[str]]) -> Iterator[Apart]:
    scope = Apart(wanted)
    token = separate_gradients.set(scope)
    try:
        yield scope
    finally:
        separate_gradients.reset(token)
        scope.drop()


@dataclass
class _Asked:
    """The inputs of `torch.autograd.grad`, sorted: tensors of the controller's graph, parameters, outputs of calls."""

    in_graph: list[Tensor] = field(default_factory=list)
    parameters: dict[int, tuple[RemoteModel, str]] = field(default_factory=dict)
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    removers: list[Callable[[], None]] = field(default_factory=list)

    @staticmethod
    def of(inputs: Sequence[Any]) -> _Asked:
        asked = _Asked()
        for position, tensor in enumerate(inputs):
            parameter = _on_workers(tensor)
            if parameter is not None:
                asked.parameters[position] = parameter
                asked.in_graph.append(parameter[0].anchor)
            elif asked._watch(position, tensor):
                asked.in_graph.append(tensor.grad_fn.next_functions[0][0].variable)
            else:
                asked.in_graph.append(tensor)
        return asked

    def _watch(self, position: int, tensor: Any) -> bool:
        watch = getattr(getattr(tensor, "grad_fn", None), "watch_output", None)
        found: list[Tensor] = []
        watcher = None if watch is None else watch(tensor.output_nr, found.append, True)
        if watcher is None:
            return False
        self.outputs[position] = found
        self.removers.append(watcher.remove)
        return True


def _on_workers(tensor: Any) -> tuple[RemoteModel, str] | None:
    """Returns the model and name of a parameter on the workers; None for any other tensor."""
    value = tensor._cell.value if isinstance(tensor, VirtualTensor) else None
    if isinstance(value, OnWorkers) and isinstance(value.owner, ModelState) and value.ref.kind == "param":
        return value.owner.live_model(), value.ref.name
    return None


def gradients(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Replaces `torch.autograd.grad`."""
    outputs, inputs = args[0], tuple(args[1])
    asked = _Asked.of(inputs)
    beyond_graph = {**asked.parameters, **asked.outputs}
    if not beyond_graph:
        with _kept_apart({}), torch._C.DisableTorchFunctionSubclass():
            return func(outputs, inputs, *args[2:], **kwargs)
    wanted: dict[RemoteModel, list[str]] = {}
    for model, name in asked.parameters.values():
        wanted.setdefault(model, []).append(name)
    quiet = {**kwargs, "allow_unused": True, "materialize_grads": False}
    parameters = [inputs[position] for position in asked.parameters]
    try:
        with _kept_apart(wanted) as scope:
            with torch._C.DisableTorchFunctionSubclass():
                found = list(func(outputs, (*asked.in_graph, *parameters), *args[2:], **quiet))
            taken = scope.take()
    finally:
        for remove in asked.removers:
            remove()
    used_here = found[len(inputs) :]  # the script computes with a parameter itself: a penalty on weights
    for (position, of), gradient in zip(asked.parameters.items(), used_here):
        found[position] = _sum(taken.get(of), gradient)
    del found[len(inputs) :]
    for position, watched in asked.outputs.items():
        found[position] = functools.reduce(_sum, watched, None)
    if kwargs.get("materialize_grads"):
        return tuple(torch.zeros_like(tensor) if grad is None else grad for tensor, grad in zip(inputs, found))
    if not kwargs.get("allow_unused") and any(grad is None for grad in found):
        raise RuntimeError(  # the text is PyTorch's
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
            "this is the desired behavior."
        )
    return tuple(found)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def backward(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Replaces `torch.autograd.backward`: with `inputs`, gradients accumulate in these tensors alone."""
    inputs = kwargs.get("inputs")
    if inputs is None:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if kwargs.get("create_graph") and any(map(_on_workers, inputs)):
        raise graph_of_kept_gradients()
    options = {"grad_outputs": kwargs.get("grad_tensors"), "retain_graph": kwargs.get("retain_graph")}
    options["create_graph"] = bool(kwargs.get("create_graph"))
    found = gradients(torch.autograd.grad, (args[0], inputs), {**options, "allow_unused": True})
    for tensor, gradient in zip(inputs, found, strict=True):
        if gradient is not None:
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
    return None


def graph_of_kept_gradients() -> UnsupportedError:
    """Returns the error for parameters whose accumulated gradients would have a graph."""
    return UnsupportedError(
        "backward(create_graph=True): parameters keep their gradients on the workers, without a graph.",
        allowed="torch.autograd.grad(..., create_graph=True) for inputs or parameters.",
        fix="gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)",
    )


def backward_of_tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Replaces `Tensor.backward`."""
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, args[1:])), **kwargs}
    given["grad_tensors"] = given.pop("gradient", None)
    return backward(torch.autograd.backward, (args[0],), given)
