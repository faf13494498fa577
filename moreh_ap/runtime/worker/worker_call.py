"""Calls of models on one worker, and what is answered: shapes at once, values and gradients when asked.

The mathematics is the parallelizer's, and `call_preparation.py` knows how a call runs; this module translates between
messages and them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moreh_ap.integrations import transformers_worker
from moreh_ap.parallelizer.call.execution import Execution, PastExecution
from moreh_ap.parallelizer.call.roles import Roles, with_gradients
from moreh_ap.parallelizer.loss.diverged import Diverged
from moreh_ap.parallelizer.rng.common_seeds import TAKEN
from moreh_ap.parallelizer.rng.policy import RandomPolicy, current_streams
from moreh_ap.parallelizer.state.loading import full_shape, full_tensor, gathered
from moreh_ap.parallelizer.trial.dry_run import StateBefore
from moreh_ap.protocol.batch import local_entries, row_range
from moreh_ap.protocol.memory_format import memory_order
from moreh_ap.protocol.messages.calls import (
    AddsMembers,
    Backward,
    DefineSignature,
    Differentiate,
    Forward,
    ForwardReply,
    NotRun,
    ReadInputGradients,
    ReadOutputGradient,
    ReadOutputs,
    ReleaseCalls,
    TakeGradients,
)
from moreh_ap.protocol.messages.tensors import (
    MAX_INLINE_BYTES,
    ArrivedTensors,
    LeafReply,
    OutputRef,
    RowShardRef,
    StateRef,
    TensorData,
    bytes_of,
    pickled_constant,
)
from moreh_ap.protocol.process_flags import set_process_flags
from moreh_ap.protocol.pytree import pickle_for_others
from moreh_ap.protocol.script_code.written_files import WRITTEN
from moreh_ap.runtime.worker.answers.late_replies import LateReply
from moreh_ap.runtime.worker.cache_arguments import without_cache
from moreh_ap.runtime.worker.call_preparation import CallPreparation, PreparedCall
from moreh_ap.runtime.worker.commands.tables import Handlers, Tables
from moreh_ap.runtime.worker.row_shard_store import RowShard, met_late
from moreh_ap.runtime.worker.second_derivatives import KIND_OF_GRADIENT, differentiate
from moreh_ap.runtime.worker.worker_model import WorkerModel


class CallCommands:
    """Executes commands about calls."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._calls: dict[int, WorkerCall] = tables.table()
        self._signatures = tables.signatures
        tables.calls = self._calls

    def handlers(self) -> Handlers:
        """Returns what executes each command."""
        return {
            DefineSignature: self._define,
            Forward: self._forward,
            Backward: self._backward,
            ReleaseCalls: self._release,
            ReadOutputs: lambda command: [self._calls[command.call_id].leaf(index) for index in command.indices],
            ReadOutputGradient: lambda command: self._calls[command.call_id].output_gradient(command.index),
            ReadInputGradients: lambda command: self._calls[command.call_id].input_gradient(command.index),
            Differentiate: self._differentiate,
            TakeGradients: self._take_gradients,
        }

    def _define(self, command: DefineSignature) -> None:
        self._signatures[command.signature] = command

    def _release(self, command: ReleaseCalls) -> None:
        for call_id in command.call_ids:
            self._calls.pop(call_id, None)

    def _forward(self, command: Forward) -> ForwardReply | NotRun | None:
        if command.grad:
            self._tables.clock.forward_begins()
        signature = self._signatures[command.signature]
        arrived = ArrivedTensors(command.tensors, self._argument, self._tables.device.torch_device)
        local = [isinstance(data, OutputRef) for data in command.tensors]
        model = self._tables.models[signature.owner]
        if command.training is not None:
            model.set_training(command.training)
        if command.flags != self._tables.flags:
            set_process_flags(command.flags)
            self._tables.flags = command.flags
        has_one_stream = not (command.grad and model.applied.stages is not None)
        random = RandomPolicy.of(command.seed, command.streams, has_one_stream=has_one_stream)
        preparation = self._tables.preparations[signature.owner]
        key = self._key(preparation, command, arrived, local)
        known = preparation.prepared.get(key)
        prepared = known or preparation.prepare(key, signature, command, arrived.whole(), local, random)
        if not isinstance(prepared, PreparedCall):
            return prepared
        gathers_or_writes = prepared.call.gathering is not None or bool(preparation.written)
        may_be_undone = prepared.kind not in preparation.run_once or gathers_or_writes
        before = StateBefore(model.module, preparation.written) if may_be_undone else None
        versions = [tensor._version for tensor in model.module.buffers()]
        self._tables.before_forward = signature.owner, versions
        run = None
        while run is None:  # whole at last: where one worker's rows raised, that raises on all
            try:
                run = self._run(prepared, arrived, random)
            except Diverged as divergence:
                if before is not None:
                    before.put_back()
                elif versions != [tensor._version for tensor in model.module.buffers()]:
                    raise divergence.after_changes() from divergence
                again = key, signature, command, arrived.whole(), local, random
                prepared = preparation.prepare_otherwise(prepared, divergence, *again)
        if before is not None:
            added = before.members.added()
            if added:
                before.put_back()
                return AddsMembers(added)
            preparation.run_once.add(prepared.kind)
        preparation.kept.update(run.attributes)
        left_out = run.left_out if model.unseen is None else [*run.left_out, *model.changed_unseen()]
        if WRITTEN or TAKEN:
            model.unseen_changes.note_effects()
        call = self._calls[command.call_id] = WorkerCall(model, run, prepared.roles, command.expected, left_out)
        call.kind = prepared.kind
        return call.reply()

    @staticmethod
    def _key(preparation: CallPreparation, command: Forward, arrived: ArrivedTensors, local: list[bool]) -> Hashable:
        """Calls with the same key run alike."""
        model = preparation.model
        settings = (
            model.settings.number,
            bytes([submodule.training for submodule in model.modules]),
            len(preparation.kept),
        )
        numbers = arrived.numbers(command.rows) if preparation.verdicts.by_values else ()
        how = (command.rows, command.grad, command.wants_grad, command.autocast_dtype, command.flags, numbers)
        return (command.signature, *arrived.layouts(), *local, settings, how)

    @staticmethod
    def _run(prepared: PreparedCall, arrived: ArrivedTensors, random: RandomPolicy) -> Execution:
        """Run the call on this worker's rows, or on the whole batch where it cannot be split."""
        share, roles, call = prepared.share, prepared.roles, prepared.call
        if share is None:
            own = arrived.whole()
        else:
            random = random.shared(roles.axis.rank, share, prepared.draws)
            own = arrived.rows(prepared.is_cut, share.start, share.stop)
        if prepared.cuts_heads is not None:
            own = prepared.cuts_heads(own)
        own = with_gradients(own, roles.wants_grad) if True in roles.wants_grad else own
        args, kwargs = prepared.nesting.fill(own)
        if prepared.keeps_no_cache:
            kwargs = without_cache(call.module if call.target is None else call.target, kwargs)
        return prepared.execute(replace(call, random=random), args, kwargs)

    def _argument(self, data: TensorData | OutputRef | StateRef) -> Tensor:
        if isinstance(data, TensorData):
            return data.on(self._tables.device.torch_device)
        if isinstance(data, OutputRef):
            return self._calls[data.call_id].local_rows(data.index).detach()
        held = self._tables.state(data)
        assert held is not None  # the controller names only tensors that every worker holds
        return held.full_tensor().to(self._tables.device.torch_device)

    def _backward(self, command: Backward) -> bytes:
        self._tables.clock.backward_begins()
        call = self._calls[command.call_id]
        model = call.model
        if command.training is not None:
            model.set_training(command.training)
        if command.separate or model.gradients_aside is not None:
            model.put_gradients_aside(command.separate)
        gradients, unseen = [self._gradient(data) for data in command.gradients], model.unseen_changes
        runs_later = not call.run.is_computed
        with nullcontext() if call.kind in unseen.known else unseen.looking_at_backward(call.kind, runs_later):
            call.backward(gradients, command.retain_graph, command.watched)
        return bytes([one.grad is not None for one in model.parameters.values()]) + call.input_gradient_flags()

    def _differentiate(self, command: Differentiate) -> ForwardReply | None:
        self._tables.clock.backward_begins()
        source = self._calls[command.of]
        if command.training is not None:
            source.model.set_training(command.training)
        call = source.differentiate(command, [self._gradient(data) for data in command.gradients])
        self._calls[command.call_id] = call
        return call.reply()

    def _gradient(self, data: TensorData | RowShardRef | None) -> Tensor | RowShard | None:
        if isinstance(data, RowShardRef):
            return self._tables.row_shards[data.number]
        return None if data is None else data.on(self._tables.device.torch_device)

    def _take_gradients(self, command: TakeGradients) -> None:
        model = self._tables.models[command.owner]
        for name, ref in command.gradients.items():
            self._tables.temporaries[ref] = model.state(StateRef(command.owner, "grad", name))
        model.put_gradients_aside(False)


class WorkerCall:
    """One call of a model, kept until the controller no longer needs it.

    Args:
        model: The model.
        run: The call, run or prepared to run in its backward.
        roles: How workers share it.
        expected: The mode that the controller counts on without having waited for the answer.
        left_out: Attributes that the forward set and that are not answered.

    Attributes:
        answers: Whether this worker answers for all that split its layers.
        input_gradients: What the last backward has left for the inputs whose gradients are wanted, by their number.
    """

    def __init__(
        self,
        model: WorkerModel,
        run: Execution,
        roles: Roles,
        expected: str | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        self.model, self.run, self.roles = model, run, roles
        self._expected, self._left_out = expected, tuple(left_out)
        self.answers = run.has_result and model.applied.position.tensor.rank == 0
        knows_nesting = model.applied.tensor is not None and run.treespec is not None
        self._in_cache = transformers_worker.cache_leaves(run.treespec) if knows_nesting else frozenset()
        self.input_gradients: dict[int, Tensor | None] = {}
        self.kind: Hashable = None  # what calls have in common of which the same is true
        self._streams = current_streams() if run.drew else None
        self._moment = model.moment() if model.runs_later else None
        self.is_past = not any(run.differentiable)  # whether no backward goes through it any more

    def __getstate__(self) -> dict[str, Any]:
        """Pickles a call that is past: what of it may be read."""
        return {**vars(self), "run": PastExecution(self.run), "_streams": None, "_moment": None}

    def _as_then(self) -> AbstractContextManager[None]:
        """Inside, everything is set as at the call, if anything of it is computed only now."""
        return nullcontext() if self._moment is None else self.model.computing_later(self._moment)

    def reply(self) -> ForwardReply | None:
        """The answer to the controller: the nesting, every shape, and the values of small outputs."""
        leaves = tuple([self._leaf(index, with_data=False) for index in range(len(self.run.shapes))])
        run, roles = self.run, self.roles
        mode = "unsplit" if not roles.is_split else "stages" if run.runs_in_stages else "split"
        warnings, self.model.unseen_changes.warnings = tuple(self.model.unseen_changes.warnings), []
        faults, self.model.faults = tuple(self.model.faults), []
        found = roles.note, roles.num_own_rows, self._streams, self._left_out, run.returned, warnings, faults
        varies = (roles.by_values or roles.has_pictures) and roles.vary(leaves)
        return ForwardReply(pickle_for_others(run.treespec), leaves, mode, *found, varies) if self.answers else None

    def output(self, index: int) -> Tensor:
        """This worker's part of an output, which may be in another precision than the script was promised."""
        with self._as_then():
            value: Tensor = self.run.outputs[index]
        return value

    def local_rows(self, index: int) -> Tensor:
        """This worker's rows of an output that has rows."""
        axis, rows = self.roles.axis, self.roles.rows
        output = self.output(index).to(self.run.shapes[index].dtype)
        return output if self.roles.is_split or rows is None else output[slice(*row_range(axis.rank, axis.size, rows))]

    def row_shard(self, index: int) -> RowShard | None:
        """This worker's shard of an output; None if it has no result. Every worker has to call it."""
        with self._as_then():
            has_result = len(self.run.outputs) > 0
        if not has_result:
            return None
        if self._expected == "split" and not self.roles.is_split:
            raise met_late(self.roles.note)
        is_split = self.run.kinds[index] == "rows"
        full = gathered(self.output(index))  # logits may be split by vocabulary
        promised = self.run.shapes[index].dtype
        return RowShard(full, self.roles.axis, self.roles.rows if is_split else None, self.answers, promised)

    def leaf(self, index: int) -> LeafReply | None:
        """One output with its bytes; None if this worker has no result. Every worker has to call it."""
        with self._as_then():
            has_result = len(self.run.outputs) > 0
        leaf = self._leaf(index, with_data=True) if has_result else None
        return leaf if self.answers else None

    def _leaf(self, index: int, *, with_data: bool) -> LeafReply:
        """One output; its bytes if asked for, or if they are few and there without computing."""
        run, shape, kind = self.run, self.run.shapes[index], self.run.kinds[index]
        if not isinstance(shape, Tensor):
            return LeafReply("const", (), None, False, pickled_constant(shape))
        few = run.is_computed and shape.numel() * shape.element_size() <= MAX_INLINE_BYTES
        tensor_parallel = self.model.applied.tensor if index in self._in_cache else None
        layout = None if tensor_parallel is None else tensor_parallel.cache_layout(shape)
        data, laid_out, is_late = None, shape, False
        if with_data or few:
            sends = self.answers and (kind != "same" or self.roles.axis.rank == 0)
            value = run.outputs[index]
            if layout is not None or type(value) is not Tensor:  # every worker that holds a part takes part
                value = full_tensor(value, layout, self.model.applied.position.tensor.group)
            laid_out = value  # a run on meta, which `shape` is of where calls run later, knows no memory formats
            is_late = sends and few and value.is_cuda
            data = bytes_of(value, shape.dtype) if sends and not is_late else b""
        is_operand = kind in ("rows", "same") and layout is None
        is_usual = layout is not None or (laid_out.layout is torch.strided and laid_out.is_contiguous())
        reply = LeafReply(
            kind,
            tuple(shape.shape) if layout is None else full_shape(shape, layout),
            shape.dtype,
            run.differentiable[index],
            data,
            is_operand,
            () if is_usual else memory_order(laid_out),
            run.repeats.get(index),
        )
        return LateReply.of(reply, value) if is_late else reply

    def backward(
        self, gradients: list[Tensor | RowShard | None], retain_graph: bool, watched: tuple[int, ...] = ()
    ) -> None:
        """Backpropagate; of `gradients` that are whole this worker takes its rows.

        Raises:
            UnsupportedError: The gradient of an output is `watched`, and the call runs in pieces or stages.
        """
        self.run.watch(watched)
        local = self._own_gradients(gradients)
        with self._as_then():
            answered = iter(self.run.backward(local, retain_graph=retain_graph))
        self.is_past = not retain_graph
        self.input_gradients = {index: next(answered) for index, wanted in enumerate(self.roles.wants_grad) if wanted}

    def differentiate(self, command: Differentiate, gradients: list[Tensor | RowShard | None]) -> WorkerCall:
        """The gradients of this call as a call of their own. See [Note: a call like others] in `gradient_pass.py`."""
        shards = [self.model.parameter(name) for name in command.parameters]
        parameters = [shard.tensor for shard in shards if shard is not None]
        own = self._own_gradients(gradients)
        run, roles = differentiate(self.run, self.roles, own, command.wants_grad, command.watched, parameters)
        return WorkerCall(self.model, run, roles)

    def _own_gradients(self, gradients: list[Tensor | RowShard | None]) -> list[Tensor | None]:
        """For each leaf of the result this worker's part of its gradient."""
        axis, rows = self.roles.axis, self.roles.rows
        local: list[Tensor | None] = []
        remaining = iter(gradients)
        for kind, shape in zip(self.run.kinds, self.run.shapes):
            gradient = next(remaining) if isinstance(shape, Tensor) else None
            is_local = isinstance(gradient, RowShard) and gradient.rows is not None
            if is_local and not self.roles.is_split:
                raise met_late(self.roles.note)
            if isinstance(gradient, RowShard):
                gradient = gradient.held
            if gradient is not None and rows is not None and kind == "rows" and not is_local:
                gradient = local_entries(gradient, axis.rank, axis.size, rows)
            local.append(gradient)
        return local

    def output_gradient(self, index: int) -> LeafReply | None:
        """The whole gradient of a watched output: rows where the output has rows; None if nothing depends on it."""
        gradient = self.run.output_gradient(index)
        if gradient is None or not self.answers:
            return None
        kind = KIND_OF_GRADIENT[self.run.kind(index)] if self.roles.is_split else "same"
        dtype = self.run.promised(index)
        return LeafReply(kind, tuple(gradient.shape), dtype, False, bytes_of(gradient, dtype))

    def input_gradient_flags(self) -> bytes:
        """A byte for each tensor input whose gradient is wanted: whether the last backward has reached it here."""
        return bytes([gradient is not None for gradient in self.input_gradients.values()])

    def input_gradient(self, index: int) -> LeafReply | None:
        """The gradient of tensor input `index`: rows where it was cut, else this worker's share of the sum.

        Zeros where backward did not reach it: it may have on another worker, or in an earlier call of the kind.
        """
        gradient = self.input_gradients[index]
        if gradient is None:
            wanted = [number for number, wants in enumerate(self.roles.wants_grad) if wants]
            gradient = torch.zeros_like(self.run.inputs[wanted.index(index)])
        kind = "same"
        if self.roles.is_split:
            kind = "rows" if self.roles.carried[index] else "share"
        reply = LeafReply(kind, tuple(gradient.shape), gradient.dtype, False, bytes_of(gradient))
        return reply if self.answers else None
