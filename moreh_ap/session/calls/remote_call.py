"""Calling a module that lives on the workers: what is sent, what is promised, and the one autograd node between.

The tensors of the result are promises. Their shapes are known from an earlier call of the same signature, or else from
the workers' answer to this one, which is waited for. `loss.backward()` reaches `_RemoteCall.backward`, which sends the
gradients of the outputs; gradients of parameters stay on the workers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_modules
from torch.utils._pytree import tree_flatten, tree_unflatten

from moreh_ap.device.tensor import ACCELERATOR, VirtualTensor, place
from moreh_ap.device.values import Cell, Value
from moreh_ap.errors import ExactnessError, UnsupportedError
from moreh_ap.integrations.transformers_worker import hand_caches_back
from moreh_ap.protocol.memory_format import memory_order
from moreh_ap.protocol.messages.calls import (
    Backward,
    Forward,
    ReadInputGradients,
    ReadOutputGradient,
    ReadOutputs,
    ReadsAttributes,
    ReleaseCalls,
)
from moreh_ap.protocol.messages.tensors import (
    MAX_INLINE_BYTES,
    LeafReply,
    OutputRef,
    PartRef,
    StateRef,
    TensorData,
    TensorSlot,
)
from moreh_ap.protocol.process_flags import GETTERS, Flags, process_flags
from moreh_ap.protocol.pytree import flatten
from moreh_ap.protocol.rng_state import Streams
from moreh_ap.session.calls.row_shards import Located, PartValue, PartView
from moreh_ap.session.models.remote_model import RemoteModel
from moreh_ap.session.models.script_hooks import RunsHereOnly, refuse_global_hooks
from moreh_ap.session.models.signatures import Structure
from moreh_ap.session.outbox import Posted
from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import OnWorkers

Watcher = Callable[[dict[int, Tensor]], object]

separate_gradients: ContextVar[Any] = ContextVar("separate_gradients", default=None)
"""Where gradients of parameters are kept apart from those of before (`autograd_api.Apart`); None where they add up."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of arguments that their text tells apart."""

_FORMS: dict[Hashable, Hashable] = {}
_MAX_FORMS = 4096


class Call:
    """One forward pass on the workers, kept there while somebody here may still need it.

    Args:
        model: The model.
        signature: What is called, see `signatures`.
    """

    def __init__(self, model: RemoteModel, signature: int) -> None:
        self.model, self._signature = model, signature
        self.id = model.session.outbox.new_id()
        self.reply: Posted | None = None
        self.structure: Structure | None = None
        self.plan = model.plan
        self.kind: Hashable = None
        """Calls of one kind have equal structures."""
        self.backward_kind: tuple[Hashable, ...] = ()
        """Backward passes of one kind reach the same parameters, if they start at the same outputs."""
        self._watchers: list[tuple[list[int], Watcher, bool]] = []
        self.input_gradients: weakref.WeakSet[InputGradient] = weakref.WeakSet()
        """Of the last backward, as far as somebody still has them."""
        weakref.finalize(self, model.session.outbox.release, ReleaseCalls((self.id,)))

    def send(self, tensors: list[Tensor], grad: bool) -> Structure:
        """Send the forward; returns the structure of its result, waiting only if it cannot be predicted."""
        model, signature = self.model, self._signature
        session, signatures = model.session, model.signatures
        training = model.send_changes()
        if not grad:
            session.traffic.step += 1
        self.backward_kind = (signature, model.settings.number)
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        flags = _flags()
        with torch._C.DisableTorchFunction():  # these questions mean the tensors as they are
            wants_grad = tuple([grad and tensor.requires_grad for tensor in tensors])
            forms = tuple([_form_of(tensor) for tensor in tensors])
            rows = next((tensor.shape[0] for tensor in tensors if tensor.ndim), None)
        self.kind = (
            signature,
            forms,
            wants_grad,
            grad,
            model.training_flags,
            model.settings.number,
            autocast,
            flags,
        )
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
        if streams is not None:  # the script's next draws follow those of the forward
            after = next((answer.streams for answer in _answered(reply.result()) if answer.streams), streams)
            generator.go_on_from(after)
        return structure

    def await_structure(self, expected: Structure | None, *, grad: bool) -> Structure:
        """The structure of the result, once the call was sent; waits for it unless it is expected."""
        model, kind, reply = self.model, self.kind, self.reply
        assert reply is not None
        if expected is None:
            replies = reply.result()
            reads = next((answer for answer in replies if isinstance(answer, ReadsAttributes)), None)
            if reads is not None:
                raise ReadsKept(reads.names)
            expected = Structure.of(replies)
            model.signatures.learn(kind, expected, grad=grad)
            model.note_left_out(_answered(replies)[0].left_out)
        else:
            known = expected
            reply.add_done_callback(lambda reply: _check_structure(model, kind, known, reply))
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
        return LeafReply.join(parts)

    def backward(self, gradients: tuple[Tensor | None, ...]) -> Posted:
        """Send the gradients of the outputs; parameters' gradients accumulate on the workers, unless kept apart.

        Returns:
            What will be answered, see `messages.Backward`.
        """
        for before in self.input_gradients:  # this backward is not the first: workers keep those of the last
            before.read()
        self.input_gradients.clear()
        encoded, training = self.encode_gradients(gradients), self.changed_training()
        session, apart = self.model.session, separate_gradients.get()
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        watched = self.watched()
        reply = session.outbox.post_soon(
            Backward(self.id, encoded, retain, training, separate=apart is not None, watched=watched)
        )
        if apart is None:
            self.model.gradients.after_backward((*self.backward_kind, _which(gradients)), reply)
        else:
            apart.after_backward(self.model, reply)
        if watched:
            found = {index: self._read_output_gradient(index) for index in watched}
            present: dict[int, Tensor] = {
                index: place(gradient) for index, gradient in found.items() if gradient is not None
            }
            self.tell_watchers(present)
        return reply

    def inputs_reached(self, gradients: tuple[Tensor | None, ...], reply: Posted, num_inputs: int) -> Sequence[bool]:
        """Which of the inputs that want a gradient a backward from `gradients` has reached.

        Waits for its answer, unless one of the kind reached them all: a gradient that is expected and is not there is
        zeros, one that is there and not expected would be lost.
        """
        return self.model.gradients.inputs_reached((self.kind, _which(gradients)), reply, num_inputs)

    def changed_training(self) -> bytes | None:
        """Training flags that were set since the call, and whatever else was.

        It counts (adapters back on after another call) where a model recomputes its blocks itself.
        """
        return None if self.model.has_left() else self.model.send_changes()

    def _read_output_gradient(self, index: int) -> Tensor | None:
        answered = _answered(self.model.session.outbox.submit(ReadOutputGradient(self.id, index)).result())
        return LeafReply.join(answered) if answered else None

    # -- gradients of outputs ----------------------------------------------------------------------------------------

    def watch(self, indices: list[int], watcher: Watcher, adds_up: bool = False) -> RemovableWatcher:
        """Have every backward call `watcher` with the whole gradients of some leaves of the result, by index.

        If it `adds_up` what it is told, it may be told parts, one after the other.
        """
        entry = (indices, watcher, adds_up)
        self._watchers.append(entry)
        return RemovableWatcher(lambda: self._watchers.remove(entry) if entry in self._watchers else None)

    def watched(self) -> tuple[int, ...]:
        """The leaves of the result whose gradients somebody watches."""
        return tuple(sorted({index for indices, *_ in self._watchers for index in indices}))

    def wants_whole_gradients(self) -> bool:
        """Whether somebody who watches does not add up."""
        return not all(adds_up for *_, adds_up in self._watchers)

    def tell_watchers(self, found: dict[int, Tensor]) -> None:
        """Give all watchers the gradients that there are."""
        for _, watcher, _ in reversed(self._watchers):
            watcher(found)

    def watch_output(
        self, output: int, watcher: Callable[[Tensor], object], adds_up: bool = False
    ) -> RemovableWatcher | None:
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
        return self.watch([index], lambda found: watcher(found[index]) if index in found else None, adds_up)

    def encode_gradients(self, gradients: Sequence[Tensor | None]) -> tuple[TensorData | PartRef | None, ...]:
        """How gradients of the outputs travel."""
        return tuple(None if one is None else self._encode_gradient(one, index) for index, one in enumerate(gradients))

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
        if len(data.data) > MAX_INLINE_BYTES:
            self.model.session.traffic.moved(len(data.data))
        return data


class ReadsKept(Exception):
    """A forward reads attributes that earlier ones have set: it is called once more, and given them.

    Args:
        names: The attributes.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(*names)
        self.names = names


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
    if torch_modules._has_any_global_hook():
        refuse_global_hooks()
    generator = model.session.generator
    random_state = (generator.state(), generator.streams()) if model.may_be_called_again() else None
    passed_state = model.passed_state(path) if model.passes_state else {}
    try:
        call, structure, leaves = _call(model, path, args, {**kwargs, **passed_state})
    except ReadsKept as forward:
        _draw_again(model, random_state)
        model.pass_on(path, forward.names)
        return call_remotely(model, path, args, kwargs, hooks_done)
    result = tree_unflatten(leaves, structure.treespec)
    if structure.is_report:
        try:
            result = model.script_hooks.run(call, structure.treespec, result, len(leaves), hooks_done)
        except RunsHereOnly as hook:
            model.session.hooks_kept_here.add(hook.key)
            _draw_again(model, random_state)
            model.note_structure()
            raise
    if structure.has_cache:
        hand_caches_back((*args, *kwargs.values()), result)
    if model.left_out:
        model.warn_of_attributes()
    return result


def call_on_route(model: RemoteModel, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `call_remotely`, for a model found earlier; NotImplemented if the script has changed it since."""
    return call_remotely(model, path, args, kwargs) if model.is_current() else NotImplemented


def _draw_again(model: RemoteModel, random_state: tuple[bytes, Streams] | None) -> None:
    """Go on from the random numbers from which a call drew that is made once more."""
    if random_state is not None:
        model.session.generator.set_state(random_state[0])
        model.session.generator.go_on_from(random_state[1])


def _call(
    model: RemoteModel, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Call, Structure, list[Any]]:
    """Send a call; returns it, how its result nests, and the leaves of that."""
    leaves, treespec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    outbox, known = model.session.outbox, None
    key: Hashable = None
    if all(type(leaf) in _PLAIN for leaf in others):
        order = tuple([isinstance(leaf, Tensor) for leaf in leaves])
        key = (path, treespec, order, tuple([(type(leaf), repr(leaf)) for leaf in others]))
        known = model.signatures.numbers.get(key)
    if known is None or outbox.has_stale_definitions or known[1] != outbox.times_forgotten:
        signature, tensors = _define(model, path, args, kwargs)
        if key is not None:
            model.signatures.numbers[key] = (signature, outbox.times_forgotten)
    else:
        signature = known[0]
    call = Call(model, signature)
    with torch._C.DisableTorchFunction():
        trainable = model.has_trainable_parameters() or any(tensor.requires_grad for tensor in tensors)
    if torch.is_grad_enabled() and trainable:
        result, structure = send_as_node(call, tensors)
    else:
        structure = call.send(tensors, grad=False)
        result = _with_constants(_promises(call, structure), structure)
    return call, structure, result


def _define(
    model: RemoteModel, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, list[Tensor]]:
    """The number of a call's signature, which workers learn of, and the tensors among its arguments.

    Raises:
        UnsupportedError: A random number generator is among the arguments.
    """
    leaves, treespec = flatten((args, kwargs))
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise UnsupportedError(
            "A torch.Generator was passed to a model: workers would draw from copies, and this one stays as it is.",
            allowed="Random numbers of the accelerator's own stream in forward(), or drawn before the call.",
            fix="noise = torch.randn(shape, generator=generator, device='cuda'); model(x, noise)",
        )
    constants = [TensorSlot() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return model.signatures.define(path, treespec, constants), [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def send_as_node(call: Call, tensors: Sequence[Tensor]) -> tuple[list[Any], Structure]:
    """Send a call as one node of the controller's autograd graph; returns the leaves of its result."""
    outputs = list(_RemoteCall.apply(call.model.anchor, call, *tensors))
    assert call.structure is not None
    return _with_constants(outputs, call.structure), call.structure


def _with_constants(tensors: Sequence[Tensor], structure: Structure) -> list[Any]:
    """The leaves of a result of which `tensors` are the tensors."""
    values = iter(tensors)
    return [leaf.constant if leaf.kind == "const" else next(values) for leaf in structure.leaves]


class OutputValue(Value):
    """An output of a call: promised, and perhaps left on the workers until somebody reads it."""

    __slots__ = ("call", "index")

    def __init__(self, call: Call, index: int) -> None:
        self.call, self.index = call, index

    def ready(self) -> bool:
        reply = self.call.reply
        return reply is not None and reply.done() and (reply.failed() or self._is_inline(reply))

    def runner(self) -> Any:
        return self.session.run_on_row_shards if self.located() is not None else None

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

    __slots__ = ("_seen", "call", "index")

    def __init__(self, call: Call, index: int) -> None:
        self.call, self.index = call, index
        self._seen: Tensor | None = None
        call.input_gradients.add(self)

    def ready(self) -> bool:
        return self._seen is not None

    def read(self) -> Tensor:
        if self._seen is None:
            replies = self.call.model.session.outbox.submit(ReadInputGradients(self.call.id, self.index)).result()
            self._seen = LeafReply.join(_answered(replies))
        return self._seen


class _RemoteCall(torch.autograd.Function):
    """Stands for a whole remote call in the controller's autograd graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        structure = call.send(list(tensors), grad=True)
        ctx.watch_output = call.watch_output  # tensors reach it through their `grad_fn`
        ctx.save_for_backward(*(tensor for tensor in tensors if tensor.requires_grad))
        ctx.call = call
        ctx.inputs = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]
        outputs = _promises(call, structure)
        templates = [leaf for leaf in structure.leaves if leaf.kind != "const"]
        ctx.mark_non_differentiable(*(out for out, leaf in zip(outputs, templates) if not leaf.differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            differentiate = ctx.call.model.session.differentiate
            found = iter(differentiate(ctx.call, gradients, ctx.saved_tensors))
            return (None, None, *(next(found) if requires_grad else None for *_, requires_grad in ctx.inputs))
        reply = ctx.call.backward(gradients)
        num_inputs = sum(requires_grad for *_, requires_grad in ctx.inputs)
        reached = iter(ctx.call.inputs_reached(gradients, reply, num_inputs) if num_inputs else ())
        input_gradients: list[Tensor | None] = []
        for index, (shape, dtype, requires_grad) in enumerate(ctx.inputs):
            if not requires_grad or not next(reached):
                input_gradients.append(None)
                continue
            meta = torch.empty(shape, dtype=dtype, device="meta")
            input_gradients.append(VirtualTensor(Cell(InputGradient(ctx.call, index), ACCELERATOR), meta))
        return (None, None, *input_gradients)


def _promises(call: Call, structure: Structure) -> list[VirtualTensor]:
    return [
        VirtualTensor(Cell(OutputValue(call, index), ACCELERATOR), leaf.meta)
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


def _flags() -> Flags:
    """The flags of the script's process that a forward follows."""
    try:
        return tuple([get() for get in GETTERS])
    except RuntimeError:  # two of them contradict each other
        return process_flags()


def _form_of(tensor: Tensor) -> Hashable:
    """Shape, dtype and order of dims in memory."""
    if tensor.layout is not torch.strided:
        return tuple(tensor.shape), tensor.dtype, memory_order(tensor)
    form = (tensor.shape, tensor.dtype, tensor.stride())
    if form not in _FORMS:
        if len(_FORMS) >= _MAX_FORMS:
            _FORMS.clear()
        _FORMS[form] = (tuple(tensor.shape), tensor.dtype, memory_order(tensor))
    return _FORMS[form]


def _which(gradients: Sequence[Tensor | None]) -> tuple[bool, ...]:
    """Which outputs have a gradient."""
    return tuple(gradient is not None for gradient in gradients)


def _answered(replies: list[Any]) -> list[Any]:
    """The answers of the workers that have a result, in rank order."""
    return [reply for reply in replies if reply is not None]


def _check_structure(model: RemoteModel, key: Any, expected: Structure, reply: Posted) -> None:
    """Runs when a predicted answer arrives: a forward whose shapes depend on values must not pass unnoticed."""
    if reply.failed():
        return
    reads = next((answer for answer in reply.result() if isinstance(answer, ReadsAttributes)), None)
    if reads is not None:
        model.session.mesh.fail(
            ExactnessError(
                f"A forward reads {', '.join(reads.names)}, which others set in some calls only.",
                allowed="Attributes that every forward of the same arguments sets.",
                fix=f"self.{reads.names[0].rpartition('.')[2]} = None  # in the calls that do not set it",
            )
        )
        return
    found = Structure.of(reply.result())
    if found.mode != expected.mode:  # rows have begun to take different ways: the next call waits, and the log says so
        model.signatures.never_predict(key)
    if found.attributes:  # set in some calls only: this one did not wait for it, others will
        model.signatures.never_predict(key)
    model.note_left_out((*found.attributes, *_answered(reply.result())[0].left_out))
    if found.draws and not expected.draws:
        model.signatures.never_predict(key)
        model.session.mesh.fail(
            ExactnessError(
                "A forward drew random numbers, and the same call had drawn none before: they are not those of one "
                "device.",
                allowed="A forward that, in one mode and with such arguments, draws always or never.",
                fix="torch.rand(()) in every forward, and a condition on what it gives",
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
