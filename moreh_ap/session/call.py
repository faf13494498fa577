"""Calling a module that lives on the workers: what is sent, what is promised, and the one autograd node between.

The tensors of the result are promises. Their shapes are known from an earlier call of the same signature, or else from
the workers' answer to this one, which is waited for. `loss.backward()` reaches `_RemoteCall.backward`, which sends the
gradients of the outputs; gradients of parameters stay on the workers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.tensor import ACCELERATOR, VirtualTensor, place
from moreh_ap.device.values import Cell, Value
from moreh_ap.errors import ExactnessError, UnsupportedError
from moreh_ap.parallelizer.containers import flatten
from moreh_ap.parallelizer.host_streams import host_streams, set_host_streams
from moreh_ap.runtime.messages import (
    MAX_INLINE_BYTES,
    Backward,
    Forward,
    LeafReply,
    OutputRef,
    PartRef,
    ReadInputGradients,
    ReadOutputGradient,
    ReadOutputs,
    ReleaseCalls,
    StateRef,
    TensorData,
    TensorSlot,
)
from moreh_ap.session import differentiation
from moreh_ap.session.model import RemoteModel
from moreh_ap.session.outbox import Posted
from moreh_ap.session.part_rules import run_on_parts
from moreh_ap.session.parts import Located, PartValue, PartView, join
from moreh_ap.session.script_hooks import RunsHereOnly, refuse_global_hooks
from moreh_ap.session.session import Session
from moreh_ap.session.signatures import Structure
from moreh_ap.session.state import OnWorkers

Watcher = Callable[[dict[int, Tensor]], object]


class Call:
    """One forward pass on the workers, kept there while somebody here may still need it."""

    def __init__(self, model: RemoteModel) -> None:
        self.model = model
        self.id = model.session.outbox.new_id()
        self.reply: Posted | None = None
        self.structure: Structure | None = None
        self.plan = model.plan
        self._backward_kind: tuple[int, int] = (0, 0)
        self._watchers: list[tuple[list[int], Watcher]] = []
        weakref.finalize(self, model.session.outbox.release, ReleaseCalls((self.id,)))

    def send(self, signature: int, tensors: list[Tensor], grad: bool) -> Structure:
        """Send the forward; returns the structure of its result, waiting only if it cannot be predicted."""
        model = self.model
        session, signatures = model.session, model.signatures
        training = model.send_changes()
        if not grad:
            session.traffic.next_step()
        self._backward_kind = (signature, model.settings.number)
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        wants_grad = tuple(grad and tensor.requires_grad for tensor in tensors)
        key = (
            signature,
            tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors),
            wants_grad,
            grad,
            model.training_flags,
            model.settings.number,
            autocast,
        )
        expected = signatures.structure(key)
        rows = next((tensor.shape[0] for tensor in tensors if tensor.dim() > 0), None)
        stream = session.generator.common_stream() if expected is None or expected.draws else None
        on_host = host_streams() if expected is None or expected.draws_on_host else None
        forward = Forward(
            call_id=self.id,
            signature=signature,
            tensors=tuple(_encode(tensor, rows, expected) for tensor in tensors),
            wants_grad=wants_grad,
            grad=grad,
            seed=session.generator.next_seed(),
            stream=stream,
            host_streams=on_host,
            training=training,
            autocast_dtype=autocast,
        )
        self.reply = session.outbox.submit(forward)
        if expected is None or stream is not None or on_host is not None:  # chance may decide what comes out
            replies = self.reply.result()
            expected = Structure.of(replies)
            signatures.learn(key, expected, grad=grad)
            answered = _answered(replies)
            model.note_left_out(answered[0].left_out)
            # What the script draws next comes after what the forward drew.
            if after := next((reply.stream for reply in answered if reply.stream), None):
                session.generator.go_on_from(after)
            if after := next((reply.host_streams for reply in answered if reply.host_streams), None):
                set_host_streams(after)
        else:
            self.reply.add_done_callback(lambda reply: _check_structure(model, key, expected, reply))
        self.structure = expected
        return expected

    def read_output(self, index: int) -> Tensor:
        """The whole value of output `index`; waits."""
        assert self.reply is not None
        parts: list[LeafReply] = [reply.leaves[index] for reply in _answered(self.reply.result())]
        if parts[0].data is None:
            replies = self.model.session.outbox.submit(ReadOutputs(self.id, (index,))).result()
            parts = _answered([reply[0] for reply in replies])
            self.model.session.traffic.moved(sum(len(part.data or b"") for part in parts))
        return join(parts)

    def backward(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Send the gradients of the outputs; parameters' gradients accumulate on the workers, unless kept apart.

        Raises:
            UnsupportedError: A graph of the backward itself is asked for.
        """
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True: gradients of gradients are not computed on the accelerator in this version.",
                allowed="backward() and torch.autograd.grad() without create_graph.",
                fix='model.to("cpu")  # a gradient penalty works on the CPU',
            )
        encoded = tuple(None if grad is None else self._encode_gradient(grad, n) for n, grad in enumerate(gradients))
        session, apart = self.model.session, differentiation.apart()
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        # What was set since (adapters back on after another call) counts where a model recomputes its blocks itself.
        training = None if self.model.has_left() else self.model.send_changes()
        watched = tuple(sorted({index for indices, _ in self._watchers for index in indices}))
        reply = session.outbox.post_soon(
            Backward(self.id, encoded, retain, training, separate=apart is not None, watched=watched)
        )
        if apart is None:
            reached_from = tuple(gradient is not None for gradient in gradients)
            self.model.gradients.after_backward((*self._backward_kind, reached_from), reply)
        else:
            apart.after_backward(self.model, reply)
        if watched:
            found = {index: self._read_output_gradient(index) for index in watched}
            present: dict[int, Tensor] = {
                index: place(gradient) for index, gradient in found.items() if gradient is not None
            }
            for _, watcher in reversed(self._watchers):
                watcher(present)

    def _read_output_gradient(self, index: int) -> Tensor | None:
        answered = _answered(self.model.session.outbox.submit(ReadOutputGradient(self.id, index)).result())
        return join(answered) if answered else None

    # -- gradients of outputs ----------------------------------------------------------------------------------------

    def watch(self, indices: list[int], watcher: Watcher) -> RemovableWatcher:
        """Have every backward call `watcher` with the whole gradients of some leaves of the result, by index."""
        entry = (indices, watcher)
        self._watchers.append(entry)
        return RemovableWatcher(lambda: self._watchers.remove(entry) if entry in self._watchers else None)

    def watch_output(self, output: int, watcher: Callable[[Tensor], object]) -> RemovableWatcher | None:
        """As `watch`, for one tensor of the result by its number among them.

        Returns:
            None where autograd in the controller knows the gradient by itself: nothing else that the call returned can
            depend on the tensor.
        """
        assert self.structure is not None
        tensors = [index for index, leaf in enumerate(self.structure.leaves) if leaf.kind != "const"]
        if sum(self.structure.leaves[index].differentiable for index in tensors) < 2:
            return None
        index = tensors[output]
        return self.watch([index], lambda found: watcher(found[index]) if index in found else None)

    def _encode_gradient(self, gradient: Tensor, index: int) -> TensorData | PartRef:
        """How the gradient of an output travels: by name if each worker has its rows of it, else as bytes."""
        assert self.structure is not None
        value = gradient._cell.value if isinstance(gradient, VirtualTensor) else None
        where = value.located() if isinstance(value, (PartValue, PartView)) else None
        if where is not None and isinstance(where.ref, PartRef) and self.plan == self.model.plan:
            tensors = [leaf for leaf in self.structure.leaves if leaf.kind != "const"]
            has_rows = tensors[index].kind == "rows"
            if where.batch == (self.structure.batch if has_rows else None):
                return where.ref
        data = TensorData.of(_on_host(gradient))
        self.model.session.traffic.moved(len(data.data))
        return data


class RemovableWatcher:
    """What hooks return: `remove` ends them."""

    def __init__(self, remove: Callable[[], object]) -> None:
        self._remove = remove

    def remove(self) -> None:
        self._remove()

    def __enter__(self) -> RemovableWatcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def call_remotely(
    model: RemoteModel, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], hooks_done: int = 0
) -> Any:
    """Run the submodule at `path` of `model` on the workers and return its result, tensors as promises.

    Args:
        model: The model.
        path: Where the submodule is.
        args: Positional arguments.
        kwargs: Keyword arguments.
        hooks_done: How many hooks of the script have run already, see `script_hooks.RunsHereOnly`.

    Raises:
        Exception: Whatever the forward raised on a worker, with its own type, if its result had to be waited for;
            otherwise it is raised by the next call or read.
    """
    refuse_global_hooks()
    if any(isinstance(argument, torch.Generator) for argument in (*args, *kwargs.values())):
        raise UnsupportedError(
            "A torch.Generator was passed to a model: workers would draw from copies, and this one stays as it is.",
            allowed="Random numbers of the accelerator's own stream in forward(), or drawn before the call.",
            fix="noise = torch.randn(shape, generator=generator, device='cuda'); model(x, noise)",
        )
    leaves, treespec = flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    constants = [TensorSlot() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    random_state = (model.session.generator.state(), host_streams()) if model.script_hooks else None
    signature = model.signatures.define(path, treespec, constants)
    call = Call(model)
    trainable = model.has_trainable_parameters() or any(tensor.requires_grad for tensor in tensors)
    if torch.is_grad_enabled() and trainable:
        outputs = list(_RemoteCall.apply(model.anchor, call, signature, *tensors))
        structure = call.structure
        assert structure is not None
    else:
        structure = call.send(signature, tensors, grad=False)
        outputs = _promises(call, structure)
    values = iter(outputs)
    result = [leaf.constant if leaf.kind == "const" else next(values) for leaf in structure.leaves]
    try:
        result = model.script_hooks.run(call, structure.treespec, result, hooks_done)
    except RunsHereOnly as hook:
        model.session.hooks_kept_here.add(hook.key)
        if random_state is not None:
            model.session.generator.set_state(random_state[0])
            set_host_streams(random_state[1])
        model.note_structure()
        raise
    model.warn_of_attributes()
    return result


class OutputValue(Value):
    """An output of a call: promised, and perhaps left on the workers until somebody reads it."""

    __slots__ = ("call", "index")

    def __init__(self, call: Call, index: int) -> None:
        self.call, self.index = call, index

    def ready(self) -> bool:
        reply = self.call.reply
        return reply is not None and reply.done() and (reply.failed() or self._is_inline(reply))

    def runner(self) -> Any:
        return run_on_parts if self.located() is not None else None

    def located(self) -> Located | None:
        """Where workers have it, if it is large and stayed with them."""
        call, structure = self.call, self.call.structure
        if structure is None or call.plan != call.model.plan:
            return None  # what another plan told of it does not hold where the model has been laid out again
        leaf = structure.leaves[self.index]
        if not leaf.has_parts or leaf.num_bytes() <= MAX_INLINE_BYTES * self.session.num_devices:
            return None
        return Located(OutputRef(call.id, self.index), structure.batch if leaf.kind == "rows" else None)

    @property
    def session(self) -> Session:
        """Where the workers are."""
        return self.call.model.session

    def _is_inline(self, reply: Posted) -> bool:
        return _answered(reply.result())[0].leaves[self.index].data is not None

    def read(self) -> Tensor:
        return self.call.read_output(self.index)


class InputGradient(Value):
    """The gradient that a backward pass left on the workers for one tensor that was given to a call."""

    __slots__ = ("call", "index")

    def __init__(self, call: Call, index: int) -> None:
        self.call, self.index = call, index

    def ready(self) -> bool:
        return False

    def read(self) -> Tensor:
        replies = self.call.model.session.outbox.submit(ReadInputGradients(self.call.id, self.index)).result()
        return join(_answered(replies))


class _RemoteCall(torch.autograd.Function):
    """Stands for a whole remote forward in the controller's autograd graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, signature: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        structure = call.send(signature, list(tensors), grad=True)
        ctx.watch_output = call.watch_output  # tensors reach it through their `grad_fn`
        ctx.call, ctx.inputs = call, [(tensor.shape, tensor.dtype) for tensor in tensors]
        outputs = _promises(call, structure)
        templates = [leaf for leaf in structure.leaves if leaf.kind != "const"]
        ctx.mark_non_differentiable(*(out for out, leaf in zip(outputs, templates) if not leaf.differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.call.backward(gradients)
        input_gradients: list[Tensor | None] = []
        for index, (shape, dtype) in enumerate(ctx.inputs):
            if not ctx.needs_input_grad[index + 3]:
                input_gradients.append(None)
                continue
            meta = torch.empty(shape, dtype=dtype, device="meta")
            input_gradients.append(VirtualTensor(Cell(InputGradient(ctx.call, index), ACCELERATOR), meta))
        return (None, None, None, *input_gradients)


def _promises(call: Call, structure: Structure) -> list[VirtualTensor]:
    return [
        VirtualTensor(Cell(OutputValue(call, index), ACCELERATOR), leaf.meta())
        for index, leaf in enumerate(structure.leaves)
        if leaf.kind != "const"
    ]


def _encode(tensor: Tensor, rows: int | None, expected: Structure | None) -> TensorData | OutputRef | StateRef:
    """How a tensor argument travels: by name if workers have it already as they will need it, else as bytes."""
    if not isinstance(tensor, VirtualTensor):
        return TensorData.of(tensor, on_device=False)
    value = tensor._cell.settle()
    if isinstance(value, OnWorkers) and value.placement() is None:
        return value.ref
    if isinstance(value, OutputValue) and expected is not None and not tensor.requires_grad:
        # What another plan told of an output does not hold where the model has been laid out again since.
        source = value.call.structure if value.call.plan == value.call.model.plan else None
        left_there = source is not None and source.leaves[value.index].kind == "rows" and tensor.dim() > 0
        if left_there and source is not None and tensor.shape[0] == rows and source.mode == expected.mode == "split":
            return OutputRef(value.call.id, value.index)
    return TensorData.of(_on_host(tensor))


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.host_value() if isinstance(tensor, VirtualTensor) else tensor


def _answered(replies: list[Any]) -> list[Any]:
    """The answers of the workers that have a result, in rank order."""
    return [reply for reply in replies if reply is not None]


def _check_structure(model: RemoteModel, key: Any, expected: Structure, reply: Posted) -> None:
    """Runs when a predicted answer arrives: a forward whose shapes depend on values must not pass unnoticed."""
    if reply.failed():
        return
    found = Structure.of(reply.result())
    if found.attributes:  # set in some calls only: this one did not wait for it, others will
        model.signatures.never_predict(key)
    model.note_left_out((*found.attributes, *_answered(reply.result())[0].left_out))
    found = found.without_attributes()
    if found.draws and not expected.draws:
        model.signatures.learn(key, found, grad=True)
    if found.draws_on_host and not expected.draws_on_host:
        model.session.mesh.fail(
            ExactnessError(
                "A forward draws from Python's or numpy's random numbers, and did not when it was first called so.",
                allowed="A forward that draws from them in every call, or in none.",
                fix="draw = random.random()  # every time, and a condition on what it gives",
            )
        )
    if not found.promises_the_same(expected):
        model.signatures.never_predict(key)
        shapes = [leaf.shape for leaf in expected.leaves], [leaf.shape for leaf in found.leaves]
        model.session.mesh.fail(
            ExactnessError(
                f"The shapes of a forward's outputs depend on the values of its inputs: {shapes[0]}, then {shapes[1]}.",
                allowed="Outputs whose shapes follow from the inputs' shapes.",
                fix="return outputs of fixed shape, or move the data-dependent selection after the call",
            )
        )
