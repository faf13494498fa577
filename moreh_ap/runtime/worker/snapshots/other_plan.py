"""Copies that workers have written under one plan, taken over by workers under another, or by another number of them.

Decides what of a copy depends on the plan, and how it is put together and divided anew. Must not know where copies lie,
nor why the plan is another.

[Note: another plan]
Every worker reads the copies of all. Parameters, gradients and states of optimizers are put together from the parts of
which each copy says where they belong, one tensor at a time, and each worker keeps its own part. Results of calls and
row shards are joined as the controller joins what workers answer, and divided by rows anew; a result of which workers
of a tensor axis have parts, such as logits, is put together from these first, and one that only the last stage of a
pipeline has is that stage's again, or of all workers without a pipeline. What trials of forwards
have found out is true for the plan and the number of workers: it is left out, and calls are tried once more.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.state.loading import Piece
from moreh_ap.parallelizer.state.state_shard import StateShard
from moreh_ap.protocol.batch import local_entries
from moreh_ap.protocol.messages.calls import Forward
from moreh_ap.protocol.messages.traces import words
from moreh_ap.protocol.process_flags import set_process_flags
from moreh_ap.protocol.rng_state import set_state_of_host
from moreh_ap.runtime.worker.commands.tables import Tables
from moreh_ap.runtime.worker.row_shard_store import RowShard
from moreh_ap.runtime.worker.snapshots.copied_parts import Description, Part
from moreh_ap.runtime.worker.snapshots.state_pickling import Name, StateUnpickler, names_of, seen_in
from moreh_ap.runtime.worker.worker_call import WorkerCall
from moreh_ap.runtime.worker.worker_model import WorkerModel

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Values of attributes that are the same on all workers."""

Read = Callable[[int], tuple[bytes, list[Tensor]]]
"""Returns what `describe` has returned on the worker of a rank."""


def why_bound(tables: Tables) -> str:
    """Returns why workers under another plan cannot take over what this worker holds; empty if they can."""
    for model in tables.models.values():
        if model.gradients_aside is not None:
            return "gradients of before a backward are kept aside"
        if not all(parameter.is_floating_point() for parameter in model.parameters.values()):
            return "weights are packed bytes"
        for name, value in model.attributes_since_made().items():
            if not all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(value)):
                return f"forward() has set {name} to something else than numbers and texts"
    shards = [one for one in tables.row_shards.values() if one is not None]
    splits_layers = any(model.plan.tensor * model.plan.pipeline > 1 for model in tables.models.values())
    temporaries = [one for one in tables.temporaries.values() if one is not None and one.shape]
    if splits_layers and (shards or temporaries):
        return "the script holds what it has computed from results of a model whose layers are split"
    if any(isinstance(call, WorkerCall) and call.input_gradients for call in tables.calls.values()):
        return "the script may read gradients of a call's inputs"
    memory = [one.content.untyped_storage().data_ptr() for one in shards if isinstance(one.content, Tensor)]
    if len(set(memory)) < len(memory):
        return "the script holds views of a result"
    return ""


def why_half_made(tables: Tables) -> str:
    """Returns what the last error has left half made here; empty if the command that raised it has changed nothing."""
    kind, _ = tables.failed or (object, 0)
    if kind is not Forward:
        return f"it ended in the middle of '{words(kind)}'"
    owner, versions = tables.before_forward
    if owner in tables.models and versions != [one._version for one in tables.models[owner].module.buffers()]:
        return "the forward had changed buffers of the model before it ended"
    if any(one.attributes_since_made() for one in tables.models.values()):
        return "forward() sets attributes"
    if any(preparation.written for preparation in tables.preparations.values()):
        return "forward() changes parameters"
    return ""


def take_over_from_all(tables: Tables, read: Read, num_workers: int) -> None:
    """Has this worker hold its part of what others have described together. See [Note: another plan].

    Args:
        tables: Those of this worker, with the same models and optimizers under any plan.
        read: Returns the copy of each of the others.
        num_workers: How many there were.
    """
    copies = _read_all(tables, read, num_workers)
    first = copies[0].held
    tables.flags, tables.last_error = first["flags"], first["last_error"]
    if tables.flags is not None:
        set_process_flags(tables.flags)
    for owner, model in tables.models.items():
        _give_model(model, owner, copies)
    for owner, optimizer in tables.optimizers.items():
        optimizer.take_over(first["optimizers"][owner], _states_of(optimizer.refs, owner, copies))
    given = first["tables"]
    device = tables.device.torch_device
    tables.signatures.update(given["signatures"])
    tables.lists.update(given["lists"])
    tables.temporaries.update({ref: _temporary(ref, copies, device) for ref in given["temporaries"]})
    for number in given["row_shards"]:
        shards = [one.held["tables"]["row_shards"][number] for one in copies]
        tables.row_shards[number] = _row_shard([one for one in shards if one is not None], device)
    calls: Any = tables.calls
    for number in given["calls"]:
        calls[number] = _call([one.held["tables"]["calls"][number] for one in copies], device)
    stream, of_host = first["streams"]
    torch.set_rng_state(stream.clone())
    set_state_of_host(of_host)
    if first["device"] is not None:
        torch.cuda.set_rng_state(first["device"].clone())


class _Copy:
    """What one worker held, its tensors where they lie in its copy.

    Attributes:
        held: What `describe` has collected.
        parts: What it has of parameters and temporaries.
    """

    def __init__(self, description: Description, memory_of: Callable[[int], Tensor], named: Mapping[Name, Any]) -> None:
        self.held: dict[str, Any] = StateUnpickler(
            description.pickled, named, memory_of, is_of_another_plan=True
        ).load()
        self.parts = description.parts
        self._place_of, self._memory_of = description.place_of, memory_of

    def parameter(self, name: Name) -> Tensor:
        """Returns the worker's part of a parameter."""
        part = self.parts[name]
        return seen_in(self._memory_of(self._place_of[name]), part.dtype, part.offset, part.size, part.strides)


def _read_all(tables: Tables, read: Read, num_workers: int) -> list[_Copy]:
    descriptions: list[Description] = []
    memories: list[list[Tensor]] = []
    for rank in range(num_workers):
        described, memory = read(rank)
        descriptions.append(pickle.loads(described))
        memories.append(memory)

    def memory_of(rank: int, index: int) -> Tensor:
        writer = descriptions[rank].elsewhere.get(index)
        if writer is None:
            return memories[rank][index]
        other, name = writer
        return memories[other][descriptions[other].place_of[name]]

    named = names_of(tables.models)
    return [
        _Copy(description, lambda index, rank=rank: memory_of(rank, index), named)  # type: ignore[misc]
        for rank, description in enumerate(descriptions)
    ]


Parts = Sequence[tuple[Sequence[Piece], Tensor]]
"""What several workers have of a tensor, and where it belongs."""


def _whole(shape: tuple[int, ...], parts: Parts) -> Tensor:
    """Returns a tensor of which workers have parts: that of a worker itself if it has all of it."""
    for of_whole, local in parts:
        if len(of_whole) == 1 and tuple(local.shape) == shape:
            return local
    full = torch.empty(shape, dtype=parts[0][1].dtype)
    for of_whole, local in parts:
        for there, here in of_whole:
            full[there] = local[here]
    return full


def _having(name: Name, copies: Sequence[_Copy]) -> list[tuple[_Copy, Part]]:
    return [(one, one.parts[name]) for one in copies if name in one.parts]


def _give_model(model: WorkerModel, owner: str, copies: Sequence[_Copy]) -> None:
    of_first = copies[0].held["models"][owner]
    for name in model.parameters:
        held = model.parameter(name)
        if held is None:
            continue
        having = _having(("parameter", owner, name), copies)
        shape = having[0][1].shape
        held.write(_whole(shape, [(part.pieces, one.parameter(("parameter", owner, name))) for one, part in having]))
        gradients = [(part.pieces, one.held["models"][owner]["gradients"].get(name)) for one, part in having]
        present = [(of_whole, gradient) for of_whole, gradient in gradients if gradient is not None]
        if present:
            model.set_gradient(name, _whole(shape, present))
        else:
            model.parameters[name].grad = None
    _give_buffers(model, [one.held["models"][owner]["buffers"] for one in copies])
    model.set_training(of_first["training"])
    model.settings.put_back(of_first["settings"])
    model.set_attributes(of_first["attributes"])


def _give_buffers(model: WorkerModel, held: Sequence[Mapping[str, Tensor]]) -> None:
    here = dict(model.module.named_buffers())
    for name, own in here.items():
        buffer = next((of_one[name] for of_one in held if name in of_one), None)
        if buffer is None or own.is_meta:
            continue
        if buffer.shape == own.shape and buffer.dtype == own.dtype:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(own):
                own.copy_(buffer)
        else:  # a forward has put another one in its place
            path, _, last = name.rpartition(".")
            setattr(model.module.get_submodule(path), last, buffer.to(own.device, copy=True))


def _states_of(refs: Sequence[Any], owner: str, copies: Sequence[_Copy]) -> dict[int, dict[str, Any]]:
    """Returns the state of an optimizer by parameter number, every tensor whole."""
    found: dict[int, dict[str, Any]] = {}
    for index, ref in enumerate(refs):
        optimizers = [(part, one.held["optimizers"][owner]) for one, part in
                      _having(("parameter", ref.owner, ref.name), copies)]  # fmt: skip
        held = [(part, one["states"][index], one["complete"][index]) for part, one in optimizers]
        having = [(part, state) for part, state, _ in held if state]
        if not having:
            continue
        complete = next(keys for _, state, keys in held if state)
        entries: dict[str, Any] = {}
        for key, value in having[0][1].items():
            if not isinstance(value, Tensor):
                entries[key] = value
            elif value.dim() > 0 and tuple(value.shape) == having[0][0].size and key not in complete:
                entries[key] = _whole(having[0][0].shape, [(part.pieces, state[key]) for part, state in having])
            else:
                entries[key] = value.clone()
        found[index] = entries
    return found


def _temporary(ref: Any, copies: Sequence[_Copy], device: torch.device) -> StateShard | None:
    """Returns a tensor that a script has computed from parameters, whole on every worker."""
    name: Name = ("temporary", *ref)
    having = _having(name, copies)
    if not having:
        return None
    held = [(part.pieces, one.held["tables"]["temporaries"][ref]) for one, part in having]
    full = _whole(having[0][1].shape, [(of_whole, shard.tensor) for of_whole, shard in held])
    return StateShard(full.to(device, copy=True), held[0][1].position)


def _row_shard(shards: Sequence[RowShard], device: torch.device) -> RowShard | None:
    if not shards:
        return None
    first = shards[0]
    kind = "same" if first.rows is None else "rows"
    own = _own_part(kind, [one.tensor for one in shards], first.axis, first.rows)
    return RowShard(own.to(device), first.axis, first.rows, True, first.promised)


def _call(calls: Sequence[WorkerCall], device: torch.device) -> WorkerCall:
    """Returns a call through which no backward goes any more, with this worker's part of its outputs."""
    first = next(one for one in calls if one.answers)
    moved, run = copy.copy(first), copy.copy(first.run)
    position = first.model.applied.position
    run.has_result = not run.runs_in_stages or position.pipeline.rank == position.pipeline.size - 1
    moved.answers = run.has_result and position.tensor.rank == 0
    if not run.has_result:  # that of the last stage
        run.outputs, moved.run = (), run  # type: ignore[misc]
        return moved
    outputs: list[Any] = []
    shapes = list(run.shapes)
    for index, (kind, shape) in enumerate(zip(run.kinds, run.shapes)):
        if not isinstance(shape, Tensor):
            outputs.append(run.outputs[index])
            continue
        parts = _of_tensor_axis(calls, index)
        own = _own_part(kind, parts, first.roles.axis, first.roles.rows).to(device)
        outputs.append(own)
        shapes[index] = torch.empty_like(own, dtype=shape.dtype, device="meta")
    run.inputs, run.outputs, run.shapes = (), outputs, shapes  # type: ignore[misc]
    moved.run = run
    return moved


def _of_tensor_axis(calls: Sequence[WorkerCall], index: int) -> list[Tensor]:
    """Returns an output of a call once for each tensor axis: of its first worker, or put together from all of it."""
    first_ones = [rank for rank, one in enumerate(calls) if one.answers]
    found = []
    for first, behind in zip(first_ones, [*first_ones[1:], len(calls)]):
        shape = calls[first].run.shapes[index].shape
        parts = [one.run.outputs[index] for one in calls[first:behind]]
        split = [dim for dim, (size, whole) in enumerate(zip(parts[0].shape, shape)) if size != whole]
        found.append(torch.cat(parts, split[0]) if split else parts[0])
    return found


def _own_part(kind: str, parts: Sequence[Tensor], axis: Axis, rows: int | None) -> Tensor:
    """Returns this worker's part of an output, as a copy.

    Args:
        kind: How workers share it, see [Note: kinds] in `call.py`.
        parts: What each of the others had.
        axis: The workers that share a batch now.
        rows: Rows of the batch.
    """
    if kind == "same":
        return parts[0].clone()
    if kind == "rows":
        full = torch.cat(list(parts))
        if rows and full.shape[0] % rows == 0:
            return local_entries(full, axis.rank, axis.size, rows).clone()
        return full if axis.rank == 0 else full[:0].clone()
    total = torch.stack(list(parts)).sum(0)
    return total if axis.rank == 0 else torch.zeros_like(total)
