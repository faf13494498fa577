"""What one worker holds beside what the commands have made that lay out models and make optimizers.

Decides what belongs to a copy of it, when there can be none, and how another worker takes it over. Must not know where
copies lie.

[Note: what is held]
Structure is made again by the same commands: modules, plans, process groups, optimizers without their state. All else
that a later command can name, or that decides what it computes, is copied: values of parameters and buffers, gradients,
states of optimizers and their hyper-parameters, results of calls, temporaries, row shards, signatures, lists, training
flags, attributes that forwards have set, random streams, and what trials of calls have found out. Where a verdict of a
trial cannot be copied, the next call of its kind is tried again.

[Note: copies of others]
Workers that hold the same shard of a parameter hold the same values of it and of its optimizer's state, bit for bit:
each gets the same sum of gradients. The first of them on each host writes these into its copy, and the others of that
host say whose that is: copies lie in memory of a host, and its workers read no other. What some worker of the next
host has, too, need not travel there (`host_exchange.py`).

[Note: one copy alone]
Where one worker has failed and the others may wait for it in a collective for ever, only its own copy can be written.
It is enough where every worker has all of every parameter. Of results that were divided by rows it has its own part: it
leaves them out, and whoever reads one later gets the error of what is in no table. The script has the values of small
results, such as losses, already.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import get_process_group_ranks

from moreh_ap.parallelizer.data.fsdp import has_gradients_to_reduce
from moreh_ap.parallelizer.group_sums import workers_of_a_host
from moreh_ap.parallelizer.state import background_writing
from moreh_ap.parallelizer.state.loading import local_shard
from moreh_ap.parallelizer.state.state_shard import StateShard
from moreh_ap.protocol.messages.snapshots import STILL_OPEN
from moreh_ap.protocol.process_flags import set_process_flags
from moreh_ap.protocol.rng_state import set_state_of_host, state_of_host
from moreh_ap.runtime.worker.call_preparation import CallPreparation
from moreh_ap.runtime.worker.commands.tables import Tables
from moreh_ap.runtime.worker.snapshots.copied_parts import Description, parts_of
from moreh_ap.runtime.worker.snapshots.state_pickling import (
    Name,
    StatePickler,
    StateUnpickler,
    flat_memory,
    kept_in_place,
    names_of,
)
from moreh_ap.runtime.worker.worker_model import WorkerModel

_TABLES = ("signatures", "lists", "temporaries", "row_shards", "calls")
_LESSONS = ("reads_of", "kept", "run_once")


class CannotBeHeld(Exception):
    """There can be no copy at the moment; the text says why."""


def describe(tables: Tables, *, is_alone: bool = False) -> tuple[bytes, list[Tensor]]:
    """Returns what the worker holds: a description, and the memory beside it.

    Args:
        tables: Those of this worker.
        is_alone: Whether there will be no copies of the others. See [Note: one copy alone].

    Raises:
        CannotBeHeld: There can be no copy at the moment.
    """
    if any(not call.is_past for call in tables.calls.values()):
        raise CannotBeHeld(STILL_OPEN)
    if tables.recording:
        raise CannotBeHeld("a model is being compared with another")
    if background_writing.is_going_on():
        raise CannotBeHeld("a checkpoint is written in the background")
    held = {
        "models": {owner: _of_model(model) for owner, model in tables.models.items()},
        "lessons": {owner: _lessons(preparation) for owner, preparation in tables.preparations.items()},
        "optimizers": {owner: optimizer.held() for owner, optimizer in tables.optimizers.items()},
        "tables": {name: dict(getattr(tables, name)) for name in _TABLES} | (_undivided(tables) if is_alone else {}),
        "flags": tables.flags,
        "last_error": tables.last_error,
        "streams": (torch.get_rng_state(), state_of_host()),
        "device": torch.cuda.get_rng_state() if tables.device.is_cuda else None,
    }
    file, states = io.BytesIO(), _states(tables)
    first = {**kept_in_place(tables.models), **{name: local_shard(one) for name, (one, _) in states.items()}}
    pickler = StatePickler(file, names_of(tables.models), first)
    try:
        pickler.dump(held)
    except Exception as error:  # of any class: objects of the script's code say themselves how they are pickled
        raise CannotBeHeld(f"{type(error).__name__}: {error}") from error
    devices = [str(one.device) for one in pickler.memory]
    shards = {pickler.place_of[name]: (name, shard) for name, (_, shard) in {**_parameters(tables), **states}.items()}
    per_host = workers_of_a_host() if tables.world_size > 1 else 1
    here, num_hosts = tables.rank // per_host, tables.world_size // per_host
    elsewhere = {} if is_alone else _at_others(tables.rank, shards, here, per_host)
    beside = _at_others(tables.rank, shards, (here + 1) % num_hosts, per_host) if num_hosts > 1 else {}
    memory = [one[:0] if index in elsewhere else one for index, one in enumerate(pickler.memory)]
    parts = parts_of(tables)
    if is_alone and any(tuple(part.size) != tuple(part.shape) for part in parts.values()):
        raise CannotBeHeld("under this plan each worker has a part of the parameters")
    description = Description(pickler.place_of, devices, elsewhere, beside, file.getvalue(), parts)
    return pickle.dumps(description), memory


def _undivided(tables: Tables) -> dict[str, dict[int, Any]]:
    """Returns the calls and row shards of which this worker has all. See [Note: one copy alone]."""
    shards = {number: one for number, one in tables.row_shards.items() if one is None or one.rows is None}
    calls: Any = tables.calls
    whole = {number: one for number, one in calls.items() if not _is_divided(one.run)}
    return {"calls": whole, "row_shards": shards}


def _is_divided(run: Any) -> bool:
    return any(kind != "same" for kind, shape in zip(run.kinds, run.shapes) if isinstance(shape, Tensor))


def for_next_host(description: bytes, memory: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """Returns a copy without what a worker of the next host has in its own. See [Note: copies of others]."""
    held: Description = pickle.loads(description)
    elsewhere = {**held.elsewhere, **held.beside}
    left = [one[:0] if index in elsewhere else one for index, one in enumerate(memory)]
    return pickle.dumps(held._replace(elsewhere=elsewhere, beside={})), left


def whole(rank: int, read: Callable[[int], tuple[bytes, list[Tensor]]]) -> tuple[bytes, list[Tensor]]:
    """Returns the copy of a worker with all that copies of others have of it.

    Args:
        rank: Whose.
        read: Returns the copy of a rank.
    """
    description, memory = read(rank)
    held: Description = pickle.loads(description)
    for other in {other for other, _ in held.elsewhere.values()}:
        of_other, its_memory = read(other)
        its_place_of = pickle.loads(of_other).place_of
        for index, (holder, name) in held.elsewhere.items():
            if holder == other:
                memory[index] = its_memory[its_place_of[name]]
    return pickle.dumps(held._replace(elsewhere={}, beside={})), memory


def take_over(tables: Tables, read: Callable[[int], tuple[bytes, list[Tensor]]]) -> None:
    """Has this worker hold what the one before it has described.

    Args:
        tables: Those of this worker, with the same models and optimizers.
        read: Returns what `describe` has returned on the worker of a rank.
    """
    description, memory = whole(tables.rank, read)
    described: Description = pickle.loads(description)
    place_of, devices = described.place_of, described.devices
    here = kept_in_place(tables.models)
    in_place = {index: here[name] for name, index in place_of.items() if name in here}
    made: dict[int, Tensor] = {}

    def memory_of(index: int) -> Tensor:
        """Returns memory with the values of before: that of a parameter or a buffer, or memory of its own."""
        if index not in made:
            flat = flat_memory(in_place[index]) if index in in_place else None
            if flat is None or flat.numel() != memory[index].numel():
                flat = torch.empty(memory[index].numel(), dtype=torch.uint8, device=devices[index])
            made[index] = flat.copy_(memory[index])
        return made[index]

    for name, tensor in here.items():  # some that shared memory may not share it here
        if name in place_of and (flat := flat_memory(tensor)).numel() == memory_of(place_of[name]).numel():
            flat.copy_(memory[place_of[name]])
    held = StateUnpickler(described.pickled, names_of(tables.models), memory_of).load()
    tables.flags, tables.last_error = held["flags"], held["last_error"]
    if tables.flags is not None:
        set_process_flags(tables.flags)
    for name, entries in held["tables"].items():
        table = getattr(tables, name)
        table.clear()
        table.update(entries)
    for owner, of_model in held["models"].items():
        _give_model(tables.models[owner], of_model)
    for owner, lessons in held["lessons"].items():
        _give_lessons(tables.preparations[owner], lessons)
    for owner, of_optimizer in held["optimizers"].items():
        tables.optimizers[owner].put_back(of_optimizer)
    stream, of_host = held["streams"]
    torch.set_rng_state(stream)
    set_state_of_host(of_host)
    if held["device"] is not None:
        torch.cuda.set_rng_state(held["device"])


def _parameters(tables: Tables) -> dict[Name, tuple[Tensor, StateShard]]:
    found: dict[Name, tuple[Tensor, StateShard]] = {}
    for owner, model in tables.models.items():
        for name in model.parameters:
            shard = model.parameter(name)
            if shard is not None:
                found["parameter", owner, name] = shard.tensor, shard
    return found


def _states(tables: Tables) -> dict[Name, tuple[Tensor, StateShard]]:
    """Returns the states of optimizers that are laid out like their parameters, with those."""
    return {
        ("state", owner, str(index), key): (value, shard)
        for owner, optimizer in tables.optimizers.items()
        for index, key, value, shard in optimizer.states()
    }


def _at_others(
    rank: int, shards: Mapping[int, tuple[Name, StateShard]], host: int, per_host: int
) -> dict[int, tuple[int, Name]]:
    """Returns which memory the copy of another worker has, of the first on a host: whose, and the name."""
    found = {}
    for place, (name, shard) in shards.items():
        holder = _holder(shard, host, per_host)
        if holder is not None and holder != rank:
            found[place] = holder, name
    return found


def _holder(shard: StateShard, host: int, per_host: int) -> int | None:
    """Returns the first worker of a host with what this worker has of a parameter. See [Note: copies of others].

    None where only this worker's own copy can replace it, or no worker of the host has it.
    """
    copies = shard.copies
    if copies is None or copies.size == 1:
        return None
    return next((rank for rank in get_process_group_ranks(copies.group) if rank // per_host == host), None)


def _of_model(model: WorkerModel) -> dict[str, Any]:
    if has_gradients_to_reduce(model.module):
        raise CannotBeHeld(STILL_OPEN)
    return {
        "gradients": {name: one.grad for name, one in model.parameters.items() if one.grad is not None},
        "aside": model.gradients_aside,
        "buffers": {name: one for name, one in model.module.named_buffers() if not one.is_meta},
        "training": model.training(),
        "settings": model.settings.held(),
        "attributes": model.attributes_since_made(),
        "looked_at": _pickled(model.unseen_changes.known),
    }


def _give_model(model: WorkerModel, held: Mapping[str, Any]) -> None:
    for name, parameter in model.parameters.items():
        parameter.grad = held["gradients"].get(name)
    model.gradients_aside = held["aside"]
    here = dict(model.module.named_buffers())
    for name, buffer in held["buffers"].items():
        own = here.get(name)
        if own is None or _form_of(own) != _form_of(buffer):  # a forward has put another one in its place
            path, _, last = name.rpartition(".")
            setattr(model.module.get_submodule(path), last, buffer)
    model.set_training(held["training"])
    model.settings.put_back(held["settings"])
    model.unseen_changes.known.update(_unpickled(held["looked_at"]))
    model.set_attributes(held["attributes"])


def _form_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _lessons(preparation: CallPreparation) -> dict[str, Any]:
    """Returns what trials and first calls have taught. See [Note: what is held]."""
    found: dict[str, Any] = {name: _pickled(_items(table)) for name, table in _lesson_tables(preparation).items()}
    name_of = {id(parameter): name for name, parameter in preparation.model.parameters.items()}
    return {**found, "written": [name_of[id(one)] for one in preparation.written]}


def _give_lessons(preparation: CallPreparation, lessons: Mapping[str, Any]) -> None:
    for name, table in _lesson_tables(preparation).items():
        table.update(_unpickled(lessons[name]))
    preparation.written = [preparation.model.parameters[name] for name in lessons["written"]]


def _lesson_tables(preparation: CallPreparation) -> dict[str, Any]:
    return {**{name: getattr(preparation, name) for name in _LESSONS}, **vars(preparation.verdicts)}


def _items(table: Any) -> Any:
    return table.items() if isinstance(table, dict) else table


def _pickled(entries: Any) -> list[bytes]:
    """Returns those entries that can be copied, each for itself."""
    found = []
    for entry in entries:
        with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError, RuntimeError):
            found.append(pickle.dumps(entry))
    return found


def _unpickled(pickled: list[bytes]) -> list[Any]:
    """Returns those entries whose classes are known here."""
    found = []
    for entry in pickled:
        with contextlib.suppress(pickle.UnpicklingError, TypeError, AttributeError, ImportError):
            found.append(pickle.loads(entry))
    return found
