"""How calls of a model run: found out once for each kind of call, and remembered.

Decides which calls are of one kind, which rows a worker computes, and what a call needs beyond an ordinary one. Whether
slices of a batch may be computed apart is for the parallelizer's `split_check.py` to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.errors import ExactnessError
from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.listed_arguments import ListedArguments
from moreh_ap.parallelizer.call.opened_forward import join_opened_blocks
from moreh_ap.parallelizer.call.parameter_writes import require_full_parameters
from moreh_ap.parallelizer.call.reports import Reports
from moreh_ap.parallelizer.call.roles import Roles, with_gradients
from moreh_ap.parallelizer.call.state_passing import PassedState, find_passed_state, split_passed_state, with_tensors
from moreh_ap.parallelizer.call.way_to_execute import Execute, way_to_execute
from moreh_ap.parallelizer.compiling.compiled_blocks import as_written
from moreh_ap.parallelizer.data.fsdp import fsdp_roots
from moreh_ap.parallelizer.items.item_probe import check_items
from moreh_ap.parallelizer.loss.diverged import Diverged
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.rng.policy import Draws, RandomPolicy
from moreh_ap.parallelizer.rng.shared_draws import Share
from moreh_ap.parallelizer.trial.split_call import Batch, batch_of, split_call, why_whole
from moreh_ap.parallelizer.trial.split_check import check_other_dims, check_split
from moreh_ap.parallelizer.trial.split_verdict import SplitVerdict, Verdicts, may_lack_rows
from moreh_ap.protocol.batch import carries_rows
from moreh_ap.protocol.dropout import draws_random_numbers
from moreh_ap.protocol.memory_format import memory_order
from moreh_ap.protocol.messages.calls import (
    UNSPLIT,
    AddsMembers,
    DefineSignature,
    Forward,
    KeepsLists,
    NotRun,
    ReadsAttributes,
    why_too_few,
)
from moreh_ap.protocol.objects.batch_items import find_items
from moreh_ap.protocol.objects.items import Items
from moreh_ap.protocol.objects.listed_rows import LISTED_ROWS
from moreh_ap.protocol.objects.picture_rows import PictureRows, find_pictures
from moreh_ap.protocol.passed_state import PASSED_STATE, names_with_rows
from moreh_ap.protocol.pytree import Nesting
from moreh_ap.runtime.worker.cache_arguments import cache_tensors, without_cache
from moreh_ap.runtime.worker.worker_model import WorkerModel

_DRAWN_APART = "Random numbers inside the model (dropout) are not those of one device: each device draws its own"
_PICTURES = "the pictures of its rows lie one behind the other"
_MAX_PREPARED = 256
_MOST_WAYS = 3  # that are learned of a forward beyond the first


@dataclass(frozen=True)
class PreparedCall:
    """How calls run that are alike but for values and random numbers.

    Attributes:
        kind: What the calls have in common; see `CallPreparation`.
        call: What to run and how, without the random numbers.
        execute: Runs it.
        nesting: Its arguments.
        roles: How workers share it.
        is_cut: For each tensor input whether this worker takes its rows of it.
        cuts_heads: Cuts keys and values of all heads among the tensor inputs to those of this worker; None without.
        keeps_no_cache: Whether the model is kept from filling a cache.
        share: The rows that this worker computes; None where it computes all.
        draws: What is drawn from streams that all workers share.
    """

    kind: Hashable
    call: Call
    execute: Execute
    nesting: Nesting
    roles: Roles
    is_cut: Sequence[bool]
    cuts_heads: Callable[[list[Tensor]], list[Tensor]] | None
    keeps_no_cache: bool
    share: Share | None
    draws: Draws


class CallPreparation:
    """How calls of a model run, found out once for each kind.

    Calls of one kind may differ in the sizes of their tensors: the same is true of them (whether slices add up, which
    attributes are read). Of calls that do not differ in sizes either, `prepared` has everything by `Forward`'s key.

    Args:
        model: The model.
    """

    def __init__(self, model: WorkerModel) -> None:
        self.model = model
        self.prepared: dict[Hashable, PreparedCall] = {}
        self.kept: set[str] = set()
        """Attributes that forwards have set so far."""
        self.written: list[Tensor] = []
        """The parameters that forwards change."""
        self.with_lists: set[Hashable] = set()
        """Kinds of calls that lists of rows were passed to."""
        self.run_once: set[Hashable] = set()
        """Kinds of calls that were run and added nothing to the model."""
        self.verdicts = Verdicts()
        self.reads_of: dict[Hashable, tuple[str, ...]] = {}
        self._drops = draws_random_numbers(model.module)
        self._looked_at: set[Hashable] = set()  # see `join_opened_blocks`
        self._faults: tuple[str, ...] = ()  # tracebacks of errors in the trials of the call that is being prepared

    @as_written()
    def prepare(
        self,
        key: Hashable,
        signature: DefineSignature,
        command: Forward,
        tensors: list[Tensor],
        local: list[bool],
        random: RandomPolicy,
    ) -> PreparedCall | NotRun:
        """Returns how a call runs, or why it cannot run on workers as it is. A collective.

        Args:
            key: Under which calls like this one are found again.
            signature: The constant part of the call.
            command: The call.
            tensors: Its tensor inputs.
            local: For each whether it has this worker's rows only.
            random: The random numbers of the whole batch.
        """
        model, rows = self.model, command.rows
        tensors = with_gradients(tensors, command.wants_grad)
        nesting = Nesting(signature.pickled_treespec, signature.pickled_constants)
        module = model.module.get_submodule(signature.path)
        carried = [is_local or (rows is not None and carries_rows(t, rows)) for t, is_local in zip(tensors, local)]
        axis = self._axis(command.grad)
        keeps_no_cache = command.grad and self._has_blocks_apart()
        args, kwargs = nesting.fill(tensors)
        if keeps_no_cache:
            kwargs = without_cache(module, kwargs)
        call = self._unsplit_call(command, module, kwargs, random)
        kind = self._kind(signature, command, tensors, carried)
        model.check_cut(kind, call, args, kwargs)
        if reads := self._reads((kind, frozenset(self.kept)), self.kept, call, args, kwargs, rows):
            return ReadsAttributes(reads)
        leaves = tree_leaves((tuple(args), dict(kwargs)))
        with_rows = {id(tensor) for tensor, carries in zip(tensors, carried) if carries}
        first_dims = tuple(0 if id(leaf) in with_rows else None for leaf in leaves)
        item_kind: Hashable = None
        items: Items | None = None if any(local) else find_pictures(args, kwargs)
        if items is not None:  # the sizes of their tensors say nothing about rows
            verdict = SplitVerdict.unsplit(why_whole(axis.size, model.plan.micro_batches, _PICTURES))
        else:
            verdict = self._verdict(kind, call, args, kwargs, rows, first_dims, local, any(command.wants_grad))
            may_have_items = not verdict.split and not verdict.is_of_first and axis.size > 1
            items = find_items(args, kwargs) if may_have_items else None
        if verdict.added:
            return AddsMembers(verdict.added)
        if items is not None and axis.size > 1 and not any(local) and not any(command.wants_grad):
            known_by = self.verdicts.key(kind, leaves, rows)
            item_kind, verdict = self._verdict_on_items(known_by, call, items, rows, verdict)
        if not verdict.split and rows is not None and axis.size > 1:
            names = names_with_rows(model.module, rows, leaves[0])
            if reads := self._reads((kind, "rows"), names, call, args, kwargs, rows):
                return ReadsAttributes(reads)
        if LISTED_ROWS in kwargs and self._has_other_lists(kind, verdict, rows, axis):
            return KeepsLists()
        if verdict.items is None:  # else there are no rows, and what a trial of them raised says nothing
            self.model.faults += self._faults
        self._faults = ()
        if any(local) and not verdict.split and axis.size > 1:
            raise ExactnessError(
                "an output of one model is an input of another, which every device computes whole",
                "inputs that the script has read",
                "x = x.detach().cpu().to(x.device)",
            )
        verdict, batch = batch_of(verdict, Batch(rows, carried), tensors, leaves, axis.size, items)
        call, share = split_call(call, verdict, batch.rows, first_dims, args, kwargs)
        note = ". ".join(filter(None, (verdict.reason, _DRAWN_APART if self._draws_apart(call) else "")))
        numbering = {id(leaves[place]) for place, _ in verdict.entries}
        meta = None if model.meta_module is None else model.meta_module.get_submodule(signature.path)
        has_pictures, batch_rows = isinstance(items, PictureRows), None if verdict.dims else batch.rows
        varies = verdict.by_values, has_pictures
        roles = Roles.of(axis, batch_rows, batch.carried, command.wants_grad, verdict.split, note, *varies)
        if len(self.prepared) >= _MAX_PREPARED:
            self.prepared.clear()
        prepared = PreparedCall(
            kind=item_kind if verdict.items is not None else self.verdicts.key(kind, leaves, command.rows),
            call=call,
            execute=way_to_execute(call, model.plan, batch.rows, meta),
            nesting=nesting,
            roles=roles,
            is_cut=[
                verdict.split and carries and not is_local and id(tensor) not in numbering
                for tensor, carries, is_local in zip(tensors, batch.carried, local)
            ],
            cuts_heads=self._cuts_heads(nesting, local),
            keeps_no_cache=keeps_no_cache,
            share=share,
            draws=verdict.draws,
        )
        if not verdict.is_of_first:
            self.prepared[key] = prepared
        return prepared

    def _has_other_lists(self, kind: Hashable, verdict: SplitVerdict, rows: int | None, axis: Axis) -> bool:
        """Returns whether a call was given lists as rows and cannot be split; asked when calls of its kind begin."""
        is_new = kind not in self.with_lists
        self.with_lists.add(kind)
        return is_new and not verdict.split and rows is not None and rows >= axis.size > 1

    def _has_blocks_apart(self) -> bool:
        """Returns whether blocks run apart from the forward around them: in a pipeline, again, or compiled."""
        plan = self.model.plan
        return self.model.applied.stages is not None or plan.recompute != "none" or plan.compile != "none"

    def _unsplit_call(self, command: Forward, module: nn.Module, kwargs: dict[str, Any], random: RandomPolicy) -> Call:
        """Returns a call of a module, the model or one inside, that every worker computes whole."""
        model, axis = self.model, self._axis(command.grad)
        passed = ((PASSED_STATE, PassedState), (LISTED_ROWS, ListedArguments))
        return Call(
            model.module,
            "unsplit",
            model.device.torch_device,
            grad=command.grad,
            axis=axis,
            random=random,
            autocast=command.autocast_dtype,
            target=None if module is model.module else module,
            extensions=(*model.extensions, *(kind() for name, kind in passed if name in kwargs)),
            meets_failed=axis.size == model.device.world_size and not fsdp_roots(model.module),
        )

    def prepare_otherwise(self, prepared: PreparedCall, divergence: Diverged, *arguments: Any) -> PreparedCall:
        """Returns how a call runs whose rows have diverged. A collective.

        Its kind is tried anew where a forward that gathers rows took another way than when it was tried (layers that
        set themselves up in a first call), or no such items were tried; else it is computed whole, or only this call.

        Args:
            prepared: How the call ran.
            divergence: How it has ended.
            *arguments: Those of `prepare`.
        """
        call, known = prepared.call, self.verdicts.known
        earlier = self.verdicts.earlier.setdefault(prepared.kind, [])
        if call.gathering is not None and len(earlier) < _MOST_WAYS:
            earlier.append(known.pop(prepared.kind))
        elif divergence.is_of_kind or call.items is None:
            by_values = known[prepared.kind].by_values
            known[prepared.kind] = SplitVerdict.unsplit(f"{UNSPLIT}: {divergence}", by_values=by_values)
        elif call.items.may_lack is None:
            known.pop(prepared.kind)
        else:
            call = replace(call, mode="unsplit", items=None, kinds=None)
            roles = prepared.roles._replace(is_split=False, num_own_rows=None, note=f"{UNSPLIT}: {divergence}")
            return replace(prepared, call=call, execute=way_to_execute(call, self.model.plan), roles=roles)
        self.prepared.clear()
        found = self.prepare(*arguments)
        assert isinstance(found, PreparedCall)
        return found

    def _cuts_heads(self, nesting: Nesting, local: list[bool]) -> Callable[[list[Tensor]], list[Tensor]] | None:
        tensor = self.model.applied.tensor
        if tensor is None or tensor.cache_ranges is None:
            return None
        inputs = [index for index in cache_tensors(nesting) if not local[index]]

        def cut(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor.own_heads(one) if index in inputs else one for index, one in enumerate(tensors)]

        return cut

    def _draws_apart(self, call: Call) -> bool:
        """Whether the model drops something, and devices have masks that one device would not have."""
        applied = self.model.applied
        return call.grad and self._drops() and (applied.stages is not None or applied.tensor is not None)

    def _kind(
        self, signature: DefineSignature, command: Forward, tensors: list[Tensor], carried: list[bool]
    ) -> Hashable:
        """Returns the key of calls that are prepared alike but for sizes."""
        inputs = tuple(
            (tensor.dim(), tensor.dtype, memory_order(tensor), rowed) for tensor, rowed in zip(tensors, carried)
        )
        settings, is_short = self.model.settings.number, self._is_short(command.rows, self._axis(command.grad))
        constant = (signature.path, signature.pickled_treespec, signature.pickled_constants, settings)
        return (constant, inputs, self.model.training(), command.grad, command.autocast_dtype, command.flags, is_short)

    def _axis(self, grad: bool) -> Axis:
        """Returns the workers that share the batch of a call, with or without gradients."""
        position = self.model.applied.position
        return position.data if grad else position.rows

    @staticmethod
    def _is_short(rows: int | None, axis: Axis) -> bool:
        """Returns whether there are fewer rows than workers that share them."""
        return rows is not None and rows < axis.size

    def _may_lend_rows(self, call: Call, rows: int, wants_grad: bool) -> bool:
        """Returns whether workers without a row may compute another's. See [Note: no row] in `lent_rows.py`."""
        plan = self.model.plan
        is_plain = all(isinstance(one, Reports) and not one.has_hooks for one in call.extensions) and not wants_grad
        return rows > 1 and is_plain and plan.tensor == plan.pipeline == plan.micro_batches == 1

    def _reads(
        self, key: Hashable, kept: set[str], call: Call, args: Sequence[Any], kwargs: dict[str, Any], rows: int | None
    ) -> tuple[str, ...]:
        """Which attributes of some a call reads before it sets them, of those that it is not given."""
        names = with_tensors(self.model.module, kept.difference(split_passed_state(kwargs)[1]))
        if not names:
            return ()
        if key not in self.reads_of:
            self.reads_of[key] = tuple(sorted(find_passed_state(call, tuple(args), kwargs, rows, names)))
        return tuple(name for name in self.reads_of[key] if name in names)

    def _verdict(
        self,
        kind: Hashable,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: int | None,
        first_dims: tuple[int | None, ...],
        local: list[bool],
        wants_grad: bool,
    ) -> SplitVerdict:
        """Whether calls like this one may be split; found out once for each kind of call."""
        workers, pieces = call.axis.size, self.model.plan.micro_batches if call.grad else 1
        is_short = self._is_short(rows, call.axis)
        if workers * pieces == 1 or rows is None or (is_short and not self._may_lend_rows(call, rows, wants_grad)):
            reason = f"{UNSPLIT}: {why_too_few(rows)}" if workers > 1 else ""
            if kind not in self.verdicts.known:
                join_opened_blocks(call, args, kwargs, self._looked_at)
                may_turn = is_short and pieces == 1 and not any(local)
                found = check_other_dims(call, args, kwargs) if may_turn else None
                self.verdicts.known[kind] = found or SplitVerdict.unsplit(reason)
            return self.verdicts.known[kind]
        leaves = tree_leaves((tuple(args), dict(kwargs)))
        known = self.verdicts.known.get(self.verdicts.key(kind, leaves, rows))
        if known is None or not known.is_about(rows) or known.is_of_first:
            verdict = check_split(
                call, args, kwargs, rows, may_join=pieces == 1, may_turn=not any(local), pieces=pieces
            )
            self.model.device.give_back(is_start=not self.verdicts.known)
            if is_short and not may_lack_rows(verdict):
                verdict = SplitVerdict.unsplit(why_too_few(rows), by_values=verdict.by_values)
            self._faults = verdict.faults
            if verdict.written:
                require_full_parameters(self.model.module, self.model.plan, verdict.written[0])
                self.written = list({*self.written, *map(self.model.module.get_parameter, verdict.written)})
            if not verdict.split:
                is_of_first = known is None and verdict.may_set_up(self.model.module)
                reason = "" if is_of_first else why_whole(workers, pieces, verdict.reason)
                verdict = replace(verdict, reason=reason, is_of_first=is_of_first)
            known = self.verdicts.add(kind, leaves, rows, first_dims, verdict)
        verdict = known
        if verdict.group > 1 and rows % (workers * pieces * verdict.group):
            reason = f"{UNSPLIT}: its {rows} rows cannot be dealt out in groups of {verdict.group}"
            return SplitVerdict.unsplit(reason)
        return verdict

    def _verdict_on_items(
        self, kind: Hashable, call: Call, items: Items, rows: int | None, verdict: SplitVerdict
    ) -> tuple[Hashable, SplitVerdict]:
        """Whether calls like this one may be split by items, and what such calls have in common.

        Args:
            kind: What calls have in common of which the same is true.
            call: What is to run.
            items: Those of its arguments.
            rows: Rows of the batch; None if no input has rows.
            verdict: What is true of it if there are no items, or if they cannot be computed apart.
        """
        plan = self.model.plan
        runs_at_once = plan.tensor == plan.pipeline == plan.micro_batches == 1
        if not runs_at_once or items.count < call.axis.size:
            return kind, verdict
        item_kind = kind, "items", items.differing_sizes()
        if item_kind not in self.verdicts.known:
            found = check_items(call, items, recomputes=plan.recompute != "none")
            self._faults += found.faults
            before = UNSPLIT if (rows or 0) < call.axis.size else f"{verdict.reason}. As {items.count} items"
            self.verdicts.known[item_kind] = (
                found if found.split else replace(found, reason=f"{before}: {found.reason}")
            )
        return item_kind, self.verdicts.known[item_kind]
