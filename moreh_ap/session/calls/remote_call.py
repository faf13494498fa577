"""Calls of a module on the workers: the command, the promised outputs, and the autograd node of the call.

The tensors of the result are promises. Their shapes are known from an earlier call of the same signature, or else from
the workers' answer to this one, which is waited for. `loss.backward()` reaches `_RemoteCall.backward`, which sends the
gradients of the outputs; gradients of parameters stay on the workers.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_modules
from torch.utils._pytree import tree_flatten, tree_unflatten

from moreh_ap.device.tensor import ACCELERATOR, VirtualTensor, on_host
from moreh_ap.device.values import Cell, Value
from moreh_ap.protocol.memory_format import memory_order
from moreh_ap.protocol.messages.calls import Backward, Forward, ReadOutputs, ReleaseCalls
from moreh_ap.protocol.messages.tensors import MAX_INLINE_BYTES, LeafReply, OutputRef, RowShardRef, StateRef, TensorData
from moreh_ap.protocol.process_flags import GETTERS, process_flags
from moreh_ap.runtime.relay.worker_values import ItemValues
from moreh_ap.session.calls.answer_check import HasToBeRepeated, answered, check_structure, learn_structure
from moreh_ap.session.calls.input_gradients import InputGradient, Kept
from moreh_ap.session.calls.joined_leaves import joined_leaf
from moreh_ap.session.calls.output_watchers import OutputWatchers, RemovableWatcher, Watcher, read_gradients
from moreh_ap.session.calls.row_shard_values import Located, RowShardedValue, RowShardedView, row_shard_ref_of
from moreh_ap.session.calls.uneven_pictures import are_no_rows
from moreh_ap.session.models.parameter_gradients import refuse_calls_of_before, separate_gradients
from moreh_ap.session.models.remote_model import RemoteModel
from moreh_ap.session.models.signatures import Structure
from moreh_ap.session.outbox import Posted
from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import OnWorkers
from moreh_ap.states import ModelPhase

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Argument types whose `repr` identifies the value."""

_FORMS, _MAX_FORMS = dict[Hashable, Hashable](), 4096


class Call:
    """One forward on the workers, which keep it as long as `kept` is referred to.

    Args:
        model: The model.
        signature: The constant part of the call, see `signatures`.
    """

    def __init__(self, model: RemoteModel, signature: int) -> None:
        self.model, self._signature = model, signature
        self.id = model.latest_call = model.session.outbox.new_id()
        self.reply: Posted | None = None
        self.structure: Structure | None = None
        self.plan, self.takes_cache = model.plan, False
        self._is_computed_later = False  # than it is answered, so that no value is in the answer
        self.kind: Hashable = None  # calls of one kind have equal structures
        self.backward_kind: tuple[Hashable, ...] = ()  # those of one kind reach the same parameters from equal outputs
        self.watchers: OutputWatchers | None = None
        self.input_gradients: Any = weakref.WeakSet()  # of the last backward, as long as the script holds them
        self.kept: Kept | None = Kept()  # handed to the result
        self.still_kept = weakref.ref(self.kept)
        weakref.finalize(self.kept, model.session.outbox.release, ReleaseCalls((self.id,)))

    @property
    def session(self) -> Session:
        """The session of the workers."""
        return self.model.session

    def send(self, tensors: list[Tensor], grad: bool) -> Structure:
        """Sends the forward; returns the structure of its result. Waits only if that cannot be predicted."""
        model, signature, session, signatures = self.model, self._signature, self.model.session, self.model.signatures
        training = model.send_changes()
        self._is_computed_later = grad and model.runs_after_answer
        session.traffic.step += not grad
        self.backward_kind = (signature, model.settings.number)
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        try:
            flags = tuple([get() for get in GETTERS])
        except RuntimeError:  # two of them contradict each other
            flags = process_flags()
        with torch._C.DisableTorchFunction():  # these questions mean the tensors as they are
            wants_grad = tuple([grad and tensor.requires_grad for tensor in tensors])
            forms = tuple([_form_of(tensor) for tensor in tensors])
            rows = next((tensor.shape[0] for tensor in tensors if tensor.ndim), None)
            rows = None if len(tensors) > 1 and max(map(Tensor.dim, tensors)) > 2 and are_no_rows(tensors) else rows
        changed = (model.training_flags, model.settings.number, autocast, flags)
        self.kind = (signature, forms, wants_grad, grad, rows is None, *changed)
        expected = signatures.structures.get(self.kind)
        generator, may_draw = session.generator, expected is None or expected.draws
        streams = generator.streams() if may_draw else None
        needs_seed = may_draw or model.runs_after_answer or not generator.workers_tell_draws
        forward = Forward(
            call_id=self.id,
            signature=signature,
            tensors=tuple([_encode(tensor, rows, expected) for tensor in tensors]),
            rows=rows,
            wants_grad=wants_grad,
            grad=grad,
            seed=generator.next_seed() if needs_seed else 0,
            streams=streams,
            training=training,
            autocast_dtype=autocast,
            flags=flags,
            expected=None if expected is None or streams is not None else expected.mode,
        )
        reply = self.reply = session.outbox.submit(forward)
        # Random operations may change the result's structure, so it is predicted only for calls that draw nothing.
        structure = self.await_structure(None if streams is not None else expected, grad=grad)
        if streams is not None:  # the script's next random numbers follow the forward's
            generator.go_on_from(next((one.streams for one in answered(reply.result()) if one.streams), streams))
        return structure

    def await_structure(self, expected: Structure | None, *, grad: bool) -> Structure:
        """The structure of the result after the call was sent; waits for the reply unless it is predicted."""
        model, kind, reply = self.model, self.kind, self.reply
        assert reply is not None
        if expected is None:
            expected = learn_structure(model, kind, reply.result(), grad=grad)
        else:
            known = expected
            reply.add_done_callback(lambda reply: check_structure(model, kind, known, reply))
        self.structure = expected
        return expected

    def read_output(self, index: int) -> Tensor:
        """Returns the full value of output `index`; waits."""
        assert self.reply is not None
        session, read, found = self.session, ReadOutputs(self.id, (index,)), None
        if self._is_computed_later and not self.reply.done():
            found = session.outbox.submit(read).result()  # one wait for both answers
        answers = self.reply.result()
        if (full := joined_leaf(answers, index) if isinstance(answers, ItemValues) else None) is not None:
            return full
        replies = [reply.leaves[index] for reply in answers if reply is not None]
        if replies[0].data is None:
            found = found or session.outbox.submit(read).result()
            replies = answered([reply[0] for reply in found])
            session.traffic.moved(sum(len(reply.data or b"") for reply in replies))
        return LeafReply.join(replies, session.lone_losses.look_at)

    def backward(self, gradients: tuple[Tensor | None, ...]) -> Posted:
        """Sends the gradients of the outputs, and returns the promise of the reply (see `messages.Backward`).

        Parameters' gradients accumulate on the workers, unless kept apart.
        """
        if self.model.phase.current is not ModelPhase.CURRENT:  # asked here: a step makes no call for it
            refuse_calls_of_before(self.model)
        while self.input_gradients:  # workers keep those of the last backward only
            self.input_gradients.pop().read()
        if self.reply is not None:
            self.reply.require()
        encoded, training, watched = self.encode_gradients(gradients), self.changed_training(), self.watched()
        session, apart = self.model.session, separate_gradients.get()
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        reply = session.outbox.post_soon(
            Backward(self.id, encoded, retain, training, separate=apart is not None, watched=watched)
        )
        if apart is None:
            kind = (*self.backward_kind, tuple([one is not None for one in gradients]))
            self.model.gradients.after_backward(kind, reply)
        else:
            apart.after_backward(self.model, reply)
        if watched:
            self.tell_watchers(read_gradients(session.outbox, self.id, watched))
        return reply

    def changed_training(self) -> bytes | None:
        """Sends what the script changed since the call; returns the training flags if they changed.

        They matter (adapters switched on again after another call) if a model recomputes its blocks itself.
        """
        return None if self.model.is_released() else self.model.send_changes()

    def watch(self, indices: list[int], watcher: Watcher, adds_up: bool = False) -> RemovableWatcher:
        """Requests gradients of the result from every backward, see `OutputWatchers.add`."""
        self.watchers = self.watchers or OutputWatchers()
        return self.watchers.add(indices, watcher, adds_up)

    def watched(self) -> tuple[int, ...]:
        """Returns the indices of the watched leaves."""
        return () if self.watchers is None else self.watchers.indices()

    def tell_watchers(self, gradients: dict[int, Tensor]) -> None:
        """Passes the gradients to all watchers."""
        if self.watchers is not None:
            self.watchers.tell(gradients)

    def encode_gradients(self, gradients: Sequence[Tensor | None]) -> tuple[TensorData | RowShardRef | None, ...]:
        """Returns the gradients of the outputs as they are sent."""
        return tuple([one if one is None else self._encode_gradient(one, at) for at, one in enumerate(gradients)])

    def _encode_gradient(self, gradient: Tensor, index: int) -> TensorData | RowShardRef:
        """Returns an output's gradient as it is sent: its number if it is row-sharded likewise, else its bytes."""
        assert self.structure is not None
        value = gradient._cell.value if isinstance(gradient, VirtualTensor) else None
        if isinstance(value, (RowShardedValue, RowShardedView)) and self.plan == self.model.plan:
            output = [leaf for leaf in self.structure.leaves if leaf.kind != "const"][index]
            ref = row_shard_ref_of(value, self.structure.batch if output.kind == "rows" else None)
            if ref is not None:
                return ref
        data = TensorData.of(on_host(gradient))
        if len(data.data) > MAX_INLINE_BYTES:
            self.session.traffic.moved(len(data.data))
        return data


def call_on_route(reference: weakref.ref[RemoteModel], path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the submodule at `path` of a model that the registry found earlier, as `call_remotely` does.

    Returns:
        The result, its tensors as promises; NotImplemented if the script has changed the model since, or uses more than
        plain calls: hooks, attributes that forwards set, caches that it passes back, members that a forward adds.
    """
    model = reference()
    if model is None or not model.is_current() or model.may_be_called_again() or torch_modules._has_any_global_hook():
        return NotImplemented
    try:
        call, structure, leaves = send_call(model, path, args, kwargs)
    except HasToBeRepeated:
        return NotImplemented
    uses_more = structure.is_report or model.untold.names or model.untold.warnings or structure.returned is not None
    if uses_more or (structure.has_cache and call.takes_cache):
        return model.session.extensions.finish(call, leaves, args, kwargs)
    return tree_unflatten(leaves, structure.treespec)


def send_call(
    model: RemoteModel, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Call, Structure, list[Any]]:
    """Sends a call; returns the call, the nesting of its result, and the leaves of the result.

    Raises:
        HasToBeRepeated: The forward reads attributes that earlier forwards set and was not given them, or adds
            something to the model.
        Exception: The forward raised it on a worker, and the result was waited for.
    """
    leaves, treespec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    outbox, known = model.session.outbox, None
    key: Hashable = None
    if all(type(leaf) in _PLAIN for leaf in others):
        order = tuple([isinstance(leaf, Tensor) for leaf in leaves])
        key = (path, treespec, order, tuple([(type(leaf), repr(leaf)) for leaf in others]))
        known = model.signatures.numbers.get(key)
    if known is None or outbox.has_stale_definitions or known.times_forgotten != outbox.times_forgotten:
        known, tensors = model.signatures.define(path, args, kwargs)
        if key is not None:
            model.signatures.numbers[key] = known
    call = Call(model, known.number)
    call.takes_cache = known.takes_cache
    with torch._C.DisableTorchFunction():
        trainable = model.has_trainable_parameters() or any(tensor.requires_grad for tensor in tensors)
    if torch.is_grad_enabled() and trainable:
        result, structure = send_as_node(call, tensors)
    else:
        structure = call.send(tensors, grad=False)
        result = _with_constants(_promises(call, structure), structure)
    return call, structure, result


def send_as_node(call: Call, tensors: Sequence[Tensor]) -> tuple[list[Any], Structure]:
    """Sends a call as one node of the controller's autograd graph; returns the leaves of its result."""
    outputs = list(_RemoteCall.apply(call.model.anchor, call, *tensors))
    assert call.structure is not None
    return _with_constants(outputs, call.structure), call.structure


def _with_constants(tensors: Sequence[Tensor], structure: Structure) -> list[Any]:
    """Returns the leaves of a result; `tensors` are the tensors among them, of which some are there twice."""
    values, leaves = iter(tensors), list[Any]()
    for leaf in structure.leaves:
        found = leaf.constant if leaf.kind == "const" else next(values)
        leaves.append(found if leaf.same_as is None else leaves[leaf.same_as])
    return leaves


class OutputValue(Value):
    """An output of a call: a promise; a large output stays on the workers until the script reads it."""

    __slots__ = ("_kept", "call", "index")

    def __init__(self, call: Call, index: int, kept: Kept | None) -> None:
        self.call, self.index, self._kept = call, index, kept

    def ready(self) -> bool:
        if (reply := self.call.reply) is None or not reply.done():
            return False
        return reply.failed() or next(filter(None, reply.result())).leaves[self.index].data is not None

    def is_order_known(self) -> bool:
        return not self.call.model.runs_after_answer  # else it was promised by a run on meta, which knows no formats

    def runner(self) -> Any:
        return self.session.extensions.run_on_row_shards if self.located() is not None else None

    def located(self) -> Located | None:
        """Where the output is on the workers, if it is large and stayed there."""
        call, structure = self.call, self.call.structure
        if structure is None or call.plan != call.model.plan:
            return None  # the structure is of another plan if the model was rebuilt since
        leaf = structure.leaves[self.index]
        if not leaf.is_operand or leaf.num_bytes() <= MAX_INLINE_BYTES * self.session.num_devices:
            return None
        return Located(OutputRef(call.id, self.index), structure.batch if leaf.kind == "rows" else None)

    @property
    def session(self) -> Session:
        """The session of the workers."""
        return self.call.model.session

    def read(self) -> Tensor:
        return self.call.read_output(self.index)


class _RemoteCall(torch.autograd.Function):
    """The autograd node of a remote call."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        structure = call.send(list(tensors), grad=True)
        # Tensors of the result reach it through their `grad_fn`.
        ctx.watch_output = functools.partial(call.session.extensions.watch_output, call)
        ctx.save_for_backward(*(tensor for tensor in tensors if tensor.requires_grad))
        ctx.call, ctx.kept = call, call.kept
        call.model.open_graphs.add(ctx)
        with torch._C.DisableTorchFunction():  # as in `send`
            ctx.inputs = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]
            outputs = _promises(call, structure)
        templates = [leaf for leaf in structure.leaves if leaf.kind != "const"]
        ctx.mark_non_differentiable(*(out for out, leaf in zip(outputs, templates) if not leaf.differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if not any(map(operator.is_not, gradients, itertools.repeat(None))):
            return (None,) * (2 + len(ctx.inputs))  # a later forward cut off what it got from here: nothing comes back
        if torch.is_grad_enabled():  # create_graph=True
            found = iter(ctx.call.session.extensions.differentiate(ctx.call, gradients, ctx.saved_tensors))
            return (None, None, *(next(found) if requires_grad else None for *_, requires_grad in ctx.inputs))
        reply = ctx.call.backward(gradients)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call.model.open_graphs.discard(ctx)
        num_inputs = sum(requires_grad for *_, requires_grad in ctx.inputs)
        # An expected gradient that is missing is zeros, but an unexpected one would be lost: unless a backward of this
        # kind has reached all inputs before, wait for the reply.
        kind = (ctx.call.kind, tuple([one is not None for one in gradients]))
        reached = iter(ctx.call.model.gradients.inputs_reached(kind, reply, num_inputs) if num_inputs else ())
        input_gradients: list[Tensor | None] = []
        for index, (shape, dtype, requires_grad) in enumerate(ctx.inputs):
            meta = torch.empty(shape, dtype=dtype, device="meta") if requires_grad and next(reached) else None
            cell = None if meta is None else Cell(InputGradient(ctx.call, index, ctx.kept), ACCELERATOR)
            input_gradients.append(None if cell is None or meta is None else VirtualTensor(cell, meta))
        return (None, None, *input_gradients)


def _promises(call: Call, structure: Structure) -> list[VirtualTensor]:
    kept, call.kept, later = call.kept, None, call._is_computed_later  # a kept loss keeps no logits on the workers
    return [
        VirtualTensor(Cell(OutputValue(call, at, kept if later or not leaf.is_told else None), ACCELERATOR), leaf.meta)
        for at, leaf in enumerate(structure.leaves)
        if leaf.kind != "const"
    ]


def _encode(tensor: Tensor, rows: int | None, expected: Structure | None) -> TensorData | OutputRef | StateRef:
    """Returns a tensor argument as it is sent: a reference if the workers have it as needed, else its bytes."""
    if not isinstance(tensor, VirtualTensor):
        return TensorData.of(tensor, on_device=False, lend=True)
    value = tensor._cell.settle()
    if isinstance(value, OnWorkers) and value.placement() is None:
        return value.ref
    if isinstance(value, OutputValue) and expected is not None and not tensor.requires_grad:
        source = value.call.structure if value.call.plan == value.call.model.plan else None  # else rebuilt since
        left_there = source is not None and source.leaves[value.index].kind == "rows" and tensor.dim() > 0
        suffices = left_there and value.session.num_devices <= tensor.shape[0] == rows  # no worker needs another's row
        if suffices and source is not None and source.mode == expected.mode == "split":
            return OutputRef(value.call.id, value.index)
    return TensorData.of(on_host(tensor), lend=True)


def _form_of(tensor: Tensor) -> Hashable:
    """Returns shape, dtype and order of dims in memory."""
    if tensor.layout is not torch.strided:
        return tuple(tensor.shape), tensor.dtype, memory_order(tensor)
    form = (tensor.shape, tensor.dtype, tensor.stride())
    if form not in _FORMS:
        if len(_FORMS) >= _MAX_FORMS:
            _FORMS.clear()
        _FORMS[form] = (tuple(tensor.shape), tensor.dtype, memory_order(tensor))
    return _FORMS[form]
