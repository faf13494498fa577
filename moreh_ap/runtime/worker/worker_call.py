"""One call of a model on one worker, and what it answers: shapes at once, values and gradients when asked.

The mathematics is the parallelizer's; this module translates between messages and it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

from moreh_ap.errors import ExactnessError, UnsupportedError
from moreh_ap.integrations import transformers_worker
from moreh_ap.parallelizer.call.forward import ForwardPass
from moreh_ap.parallelizer.call.gradient_pass import GradientPass
from moreh_ap.parallelizer.call.micro_batches import DeferredForward
from moreh_ap.parallelizer.call.pipelined_forward import PipelinedForward
from moreh_ap.parallelizer.call.split_check import SplitProof
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.state.loading import full_tensor, gathered, whole_shape
from moreh_ap.protocol.batch import own_entries, row_range
from moreh_ap.protocol.memory_format import memory_order
from moreh_ap.protocol.messages.calls import Differentiate, ForwardReply
from moreh_ap.protocol.messages.tensors import MAX_INLINE_BYTES, LeafReply, bytes_of
from moreh_ap.protocol.pytree import pickle_treespec
from moreh_ap.protocol.rng_state import Streams, state_of_host, state_of_stream
from moreh_ap.runtime.worker.row_shard_store import Part

if TYPE_CHECKING:
    from moreh_ap.runtime.worker.worker_model import WorkerModel

_KIND_OF_GRADIENT = {"rows": "rows", "same": "share", "share": "same"}
"""What every worker computes alike is used by each for its rows; a share of a sum gets the gradient of the sum."""


class InputRoles(NamedTuple):
    """Who shares the batch, its rows, for each tensor input whether it was cut and its gradient is wanted, and the mode
    that the controller expects."""

    axis: Axis
    rows: int | None
    carried: list[bool]
    wants_grad: tuple[bool, ...]
    expected: str | None = None


class WorkerCall:
    """One forward pass of this worker, kept until the controller no longer needs it."""

    def __init__(
        self,
        model: WorkerModel,
        run: ForwardPass | DeferredForward,
        proof: SplitProof,
        inputs: InputRoles,
        left_out: Sequence[str] = (),
    ) -> None:
        self._left_out = tuple(left_out)
        self.model, self._run, self._proof, self._inputs = model, run, proof, inputs
        self._answers = run.has_result and model.applied.position.tensor.rank == 0
        knows_nesting = model.applied.tensor is not None and run.treespec is not None
        self._in_cache = transformers_worker.cache_leaves(run.treespec) if knows_nesting else frozenset()
        self._input_gradients: dict[int, Tensor | None] = {}
        self._streams = Streams(state_of_stream(), state_of_host()) if run.drew else None
        self._moment = model.moment()

    def reply(self) -> ForwardReply | None:
        """What the controller is told at once: the nesting, every shape, and small values that are there."""
        leaves = tuple(self._leaf(index, with_data=False) for index in range(len(self._run.shapes)))
        mode = "whole" if not self._proof.split else "stages" if isinstance(self._run, PipelinedForward) else "split"
        reply = ForwardReply(
            pickle_treespec(self._run.treespec),
            leaves,
            mode,
            self._proof.reason,
            self._num_own_rows(),
            self._streams,
            self._left_out,
        )
        return reply if self._answers else None

    def _num_own_rows(self) -> int | None:
        axis, rows = self._inputs.axis, self._inputs.rows
        if not self._proof.split or rows is None:
            return None
        start, stop = row_range(axis.rank, axis.size, rows)
        return stop - start

    def output(self, index: int) -> Tensor:
        """This worker's part of an output."""
        with self.model.computing_later(self._moment):
            value: Tensor = self._run.outputs[index]
        return value

    def own_rows(self, index: int) -> Tensor:
        """This worker's rows of an output that has rows."""
        output, axis, rows = self.output(index), self._inputs.axis, self._inputs.rows
        return output if self._proof.split or rows is None else output[slice(*row_range(axis.rank, axis.size, rows))]

    def part(self, index: int) -> Part | None:
        """This worker's part of an output; None if it has no result. Every worker has to call it."""
        if not len(self._run.outputs):
            return None
        if self._inputs.expected == "split" and not self._proof.split:
            raise _met_late(self._proof.reason)
        is_split = self._run.kinds[index] == "rows"
        whole = gathered(self.output(index))  # logits may be split by vocabulary
        return Part(whole, self._inputs.axis, self._inputs.rows if is_split else None, self._answers)

    def leaf(self, index: int) -> LeafReply | None:
        """One output with its bytes; None if this worker has no result. Every worker has to call it."""
        with self.model.computing_later(self._moment):
            has_result = len(self._run.outputs) > 0
        leaf = self._leaf(index, with_data=True) if has_result else None
        return leaf if self._answers else None

    def _leaf(self, index: int, *, with_data: bool) -> LeafReply:
        """One output; its bytes if asked for, or if they are few and there without computing."""
        shape = self._run.shapes[index]
        if not isinstance(shape, Tensor):
            return LeafReply("const", (), None, False, _pickle_constant(shape))
        kind = self._run.kinds[index]
        layout = self.model.cache_layout(shape) if index in self._in_cache else None
        few = self._run.computed and shape.numel() * shape.element_size() <= MAX_INLINE_BYTES
        data = None
        if with_data or few:
            sends = self._answers and (kind != "same" or self._inputs.axis.rank == 0)
            whole = full_tensor(self._run.outputs[index], layout, self.model.applied.position.tensor.group)
            data = bytes_of(whole) if sends else b""
        has_parts = kind in ("rows", "same") and layout is None
        differentiable = self._run.differentiable[index]
        order = memory_order(shape) if layout is None else ()
        return LeafReply(kind, whole_shape(shape, layout), shape.dtype, differentiable, data, has_parts, order)

    def backward(
        self, gradients: list[Tensor | Part | None], retain_graph: bool, watched: tuple[int, ...] = ()
    ) -> None:
        """Backpropagate; of `gradients` that are whole this worker takes its rows.

        Raises:
            UnsupportedError: The gradient of an output is `watched`, and the call runs in pieces or stages.
        """
        if isinstance(self._run, ForwardPass):
            self._run.watched = watched
        elif watched:
            raise UnsupportedError(
                "The gradient of an output was asked for (a hook, retain_grad, autograd.grad) of a call that runs in "
                "micro-batches or stages.",
                "plans without micro-batches and pipeline",
                'plan="replicate=2"',
            )
        local = self._own_gradients(gradients)
        with self.model.computing_later(self._moment):
            answered = iter(self._run.backward(local, retain_graph=retain_graph))
        self._input_gradients = {
            index: next(answered) for index, wanted in enumerate(self._inputs.wants_grad) if wanted
        }

    def differentiate(self, command: Differentiate, gradients: list[Tensor | Part | None]) -> WorkerCall:
        """The gradients of this call as a call of their own. See [Note: a call like others] in `gradient_pass.py`."""
        assert isinstance(self._run, ForwardPass)  # the controller asks under no other plan
        kinds, carried = self._run.kinds if self._proof.split else (), self._inputs.carried
        wanted = [index for index, wants in enumerate(self._inputs.wants_grad) if wants]
        parameters = [held.tensor for name in command.parameters if (held := self.model.parameter(name)) is not None]
        result_kinds: list[str] = []
        if self._proof.split:
            result_kinds = ["rows" if carried[index] else "share" for index in wanted]
            result_kinds += [_KIND_OF_GRADIENT[self._run.kind(index)] for index in command.watched]
            result_kinds += ["share"] * len(parameters)
        own = self._own_gradients(gradients)
        tensors = [index for index, shape in enumerate(self._run.shapes) if isinstance(shape, Tensor)]
        given = [index for index in tensors if own[index] is not None]
        wants_grad = dict(zip(tensors, command.wants_grad, strict=True))
        for index in given:
            own[index] = own[index].detach().requires_grad_(wants_grad[index])  # type: ignore[union-attr]
        run = GradientPass(self._run, own, tuple(result_kinds), command.watched, parameters)  # type: ignore[arg-type]
        inputs = InputRoles(
            self._inputs.axis,
            self._inputs.rows,
            [bool(kinds) and kinds[index] == "rows" for index in given] + [carried[index] for index in wanted],
            (*(wants_grad[index] for index in given), *(True for _ in wanted)),
        )
        return WorkerCall(self.model, run, SplitProof(self._proof.split, tuple(result_kinds), ""), inputs)

    def _own_gradients(self, gradients: list[Tensor | Part | None]) -> list[Tensor | None]:
        """For each leaf of the result this worker's part of its gradient."""
        axis, rows = self._inputs.axis, self._inputs.rows
        local: list[Tensor | None] = []
        whole = iter(gradients)
        for index, shape in enumerate(self._run.shapes):
            gradient = next(whole) if isinstance(shape, Tensor) else None
            is_local = isinstance(gradient, Part) and gradient.rows is not None
            if is_local and not self._proof.split:
                raise _met_late(self._proof.reason)
            if isinstance(gradient, Part):
                gradient = gradient.tensor
            is_split = self._run.kinds[index] == "rows"
            if gradient is not None and rows is not None and is_split and not is_local:
                gradient = own_entries(gradient, axis.rank, axis.size, rows)
            local.append(gradient)
        return local

    def output_gradient(self, index: int) -> LeafReply | None:
        """The whole gradient of a watched output: rows where the output has rows; None if nothing depends on it."""
        assert isinstance(self._run, ForwardPass)
        gradient = self._run.output_gradients.get(index)
        if gradient is None or not self._answers:
            return None
        kind = _KIND_OF_GRADIENT[self._run.kind(index)] if self._proof.split else "same"
        return LeafReply(kind, tuple(gradient.shape), gradient.dtype, False, bytes_of(gradient))

    def input_gradient_flags(self) -> bytes:
        """A byte for each tensor input whose gradient is wanted: whether the last backward has reached it here."""
        return bytes(gradient is not None for gradient in self._input_gradients.values())

    def input_gradient(self, index: int) -> LeafReply | None:
        """The gradient of tensor input `index`: rows where it was cut, else this worker's share of the sum.

        Zeros where backward did not reach it: it may have on another worker, or in an earlier call of the kind.
        """
        gradient = self._input_gradients[index]
        if gradient is None:
            wanted = [number for number, wants in enumerate(self._inputs.wants_grad) if wants]
            gradient = torch.zeros_like(self._run.inputs[wanted.index(index)])
        kind = "same"
        if self._proof.split:
            kind = "rows" if self._inputs.carried[index] else "share"
        reply = LeafReply(kind, tuple(gradient.shape), gradient.dtype, False, bytes_of(gradient))
        return reply if self._answers else None


def _pickle_constant(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return cloudpickle.dumps(value)


def _met_late(reason: str) -> ExactnessError:
    """Makes the error for rows that the script computes with already, of a call that turned out to need all of them."""
    return ExactnessError(
        f"{reason}, which was found out when the script had already computed with rows of its result.",
        allowed="A loss that the forward itself takes, or one that is read in every step.",
        fix="loss = model(**batch).loss",
    )
