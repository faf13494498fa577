"""Training checkpoints: models and optimizers saved under one plan and loaded under any other, or without a plan.

Decides what of models and optimizers is saved and how it is restored. Must not know the format of the folder
(`checkpoint_folder.py`), how files are written (`parallelizer/state/checkpoint_files.py`), or what a plan is.

[Note: nothing passes through the controller]
Workers write the state shards whose copy is canonical, and read the state shards that they hold. A model that was never
called is not on the workers yet: loading gives its tensors values that lie in the checkpoint (`InFile`), and the
workers read them at the first call. The controller writes the tensors that it holds itself, one by one.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moreh_ap import device
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.values import View, read_into
from moreh_ap.errors import LoadError, OptionError
from moreh_ap.parallelizer.state.checkpoint_files import Box, WrittenFile, check_dtype, write_file
from moreh_ap.protocol.messages.checkpoints import CheckFiles, ReadCheckpoint, WriteCheckpoint
from moreh_ap.protocol.messages.tensors import SavedTensor, StateRef
from moreh_ap.protocol.tensor_source import TensorSource
from moreh_ap.session.checkpoint import background_save
from moreh_ap.session.checkpoint.background_save import SaveInProgress
from moreh_ap.session.checkpoint.checkpoint_folder import (
    Checkpoint,
    FilesToCheck,
    open_last_whole,
    other_model,
    problems_of,
    some,
    unknown,
)
from moreh_ap.session.checkpoint.checkpoint_optimizer import check_groups, describe_optimizer, load_optimizer
from moreh_ap.session.checkpoint.checkpoint_values import Encoder, decode
from moreh_ap.session.checkpoint.folder_lock import LOCK_WAITS_S
from moreh_ap.session.checkpoint.new_checkpoint import NewCheckpoint, seen
from moreh_ap.session.checkpoint.script_state import restore_random_streams
from moreh_ap.session.checkpoint.workers_files import written, written_in_background
from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import OnWorkers


def save(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    background: bool = False,
) -> SaveInProgress:
    """Saves models, optimizers and other state of a training run into `folder`.

    If the save is interrupted, the folder keeps its earlier content.

    Args:
        folder: Created if it does not exist.
        model: The model, or models by names of your choice.
        optimizer: The optimizer, or optimizers by names. Their parameters must be the models'.
        extra: Numbers, strings, tensors, numpy arrays, and lists, tuples and dicts of them, such as
            ``scheduler.state_dict()``.
        keep: How many checkpoints stay in the folder, this one counted: if it is damaged later, `load` takes the one
            before it.
        background: Whether to return once the state is copied, and to write it while the script goes on. The next save
            or load waits for that, and so does the end of the script. Workers on several hosts write before.

    Returns:
        The save; its `result()` waits until the checkpoint is complete.

    Raises:
        OptionError: `keep` is less than 1.
        UnsupportedError: `extra` or an optimizer holds a value of a type that a checkpoint cannot hold.
        OSError: A file could not be written, or could not at the last save in the background.
    """
    if keep < 1:
        raise OptionError(f"keep={keep}", "1 or more checkpoints", "moreh_ap.save(folder, model=model, keep=2)")
    with background_save.one_at_a_time():
        return _begin_save(folder, model, optimizer, extra or {}, keep, background)


def save_automatically(
    folder: str,
    *,
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer],
    extra: Mapping[str, Any],
    random: Mapping[str, Any],
    background: bool,
    waits_s: float,
) -> SaveInProgress:
    """Saves what `save` does, and random streams, which `load` restores.

    Args:
        folder, model, optimizer, extra, background: As for `save`.
        random: The streams, as in [Note: two states] of `script_state`.
        waits_s: How long to wait for another process that saves into the folder.
    """
    with background_save.one_at_a_time():
        return _begin_save(folder, model, optimizer, extra, 2, background, random, waits_s)


def _begin_save(
    folder: str | os.PathLike[str],
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer] | None,
    extra: Mapping[str, Any],
    keep: int,
    background: bool,
    random: Mapping[str, Any] | None = None,
    waits_s: float = LOCK_WAITS_S,
) -> SaveInProgress:
    models, optimizers = _by_name(model, "model"), _by_name(optimizer, "optimizer")
    encoder = Encoder()
    names = _parameter_names(models)
    content: dict[str, Any] = {
        "models": {name: _tensor_names(each_model, name, encoder) for name, each_model in models.items()},
        "optimizers": {
            name: describe_optimizer(each_optimizer, name, names, encoder)
            for name, each_optimizer in optimizers.items()
        },
        "extra": encoder.encode(dict(extra), "extra"),
        "generator": None,
        "random": encoder.encode(None if random is None else dict(random), "random"),
    }
    accelerator = device.current()
    if accelerator is not None:
        content["generator"] = accelerator.session.generator.state().hex()
    new = NewCheckpoint(folder, keep, waits_s)
    try:
        write_files = _begin_files(new, encoder.tensors, background)
    except BaseException:
        new.give_up()
        raise
    return background_save.run(lambda: new.write(write_files, encoder.tensors, content), in_background=background)


def load(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Loads models and optimizers from a checkpoint, under any plan, or without a plan.

    Nothing is changed unless the checkpoint has everything that is requested. If files of the last checkpoint are
    damaged, a warning names them, and the one before it is loaded.

    Args:
        folder: The folder that `save` wrote. It must exist until the first call of a model that was never called.
        model: The model, or models under the names with which they were saved.
        optimizer: Likewise; an optimizer's parameters are found by their names in `model`, which it needs.
        verify: Whether to compare the files with their checksums. Their sizes are always compared.

    Returns:
        The `extra` that was saved, with tensors on the CPU.

    Raises:
        LoadError: There is no checkpoint that is not damaged, or a tensor is missing or has another shape.
    """
    background_save.wait()
    checkpoint = open_last_whole(folder, verify=verify, find_problems=lambda files: _problems(files, verify))
    models, optimizers = _by_name(model, "model"), _by_name(optimizer, "optimizer")
    names = _parameter_names(models)
    values: dict[str, Tensor] = {}
    for name, each_model in models.items():
        values |= _matching(checkpoint, each_model, name)
    for name, each_optimizer in optimizers.items():
        check_groups(checkpoint, each_optimizer, name, names)
    extra: dict[str, Any] = decode(checkpoint.content["extra"], checkpoint.read)

    _set_values(checkpoint, values)
    for name, each_optimizer in optimizers.items():
        load_optimizer(checkpoint, each_optimizer, name, names)
    accelerator = device.current()
    seen(checkpoint.folder)
    if optimizers:
        restore_random_streams(checkpoint, extra)
    if accelerator is not None and accelerator.in_use():
        accelerator.session.synchronize()
    return extra


# -- names ---------------------------------------------------------------------------------------------------------


def _by_name(given: Any, name: str) -> dict[str, Any]:
    if given is None:
        return {}
    return {f"{name}.{key}": value for key, value in given.items()} if isinstance(given, Mapping) else {name: given}


def _state_of(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Returns the tensors of a model by their names in a checkpoint; tied tensors have one name."""
    model = getattr(model, "_orig_mod", model)  # the module that torch.compile wraps
    found = {f"{name}/{key}": tensor for key, tensor in model.named_parameters()}
    for path, module in model.named_modules():
        for key, buffer in module.named_buffers(path, recurse=False):
            if key.rpartition(".")[2] not in module._non_persistent_buffers_set:
                found[f"{name}/{key}"] = buffer
    return found


def _parameter_names(models: dict[str, nn.Module]) -> dict[int, str]:
    return {
        id(tensor): key for name, each_model in models.items() for key, tensor in _state_of(each_model, name).items()
    }


# -- saving --------------------------------------------------------------------------------------------------------


def _tensor_names(model: nn.Module, name: str, encoder: Encoder) -> list[str]:
    state = _state_of(model, name)
    encoder.tensors.update(state)
    return list(state)


def _begin_files(new: NewCheckpoint, tensors: dict[str, Tensor], background: bool) -> Callable[[], list[WrittenFile]]:
    """Has the workers write, or copy and write, what they hold; returns what writes the rest and collects all files."""
    on_workers: dict[Session, dict[str, StateRef]] = defaultdict(dict)
    boxes = []
    for name, tensor in tensors.items():
        check_dtype(name, tensor.dtype)
        value = tensor._cell.value if isinstance(tensor, VirtualTensor) else None
        if isinstance(value, OnWorkers):
            on_workers[value.owner.session][name] = value.ref
        else:
            boxes.append(Box.of(name, tensor, _copy_of(tensor) if background else _reader(tensor)))
    shares_folder = all(session.workers.shares_memory for session in on_workers)
    witness = "" if shares_folder else new.make_witness()
    path = new.path("worker")
    in_background = background and shares_folder
    background_save.awaited.update([path] if in_background else [])
    try:
        commands = {
            session: WriteCheckpoint(path, refs, witness, in_background) for session, refs in on_workers.items()
        }
        writing = {session: session.outbox.submit(command) for session, command in commands.items()}
    except BaseException:
        background_save.awaited.discard(path)
        raise
    groups = {session: session.workers for session in writing}

    def write_files() -> list[WrittenFile]:
        try:
            files = [write_file(f"{new.path('controller')}.safetensors", boxes)]
            for session, posted in writing.items():
                if in_background:
                    files += written_in_background(groups[session], posted, path)
                else:
                    files += written(session, commands[session], posted, new)
            return [file for file in files if file is not None]
        finally:
            background_save.awaited.discard(path)

    if not background or in_background:
        return write_files
    files = write_files()
    return lambda: files


def _copy_of(tensor: Tensor) -> Callable[[], Tensor]:
    copy = tensor.host_value().detach().clone() if isinstance(tensor, VirtualTensor) else tensor.detach().clone()
    return lambda: copy


def _reader(tensor: Tensor) -> Callable[[], Tensor]:
    return tensor.host_value if isinstance(tensor, VirtualTensor) else tensor.detach


# -- loading: the checkpoint is complete ---------------------------------------------------------------------------


def _problems(files: FilesToCheck, verify: bool) -> dict[str, str]:
    """Returns the problems of a checkpoint's files; workers share the reading if an accelerator runs."""
    accelerator = device.current()
    if accelerator is not None:
        accelerator.session.workers.provide([path for path, _, _ in files])
    if not verify or accelerator is None:
        return problems_of(files)
    found: dict[str, str] = {}
    for reply in accelerator.session.outbox.submit(CheckFiles(files)).result():
        found |= reply
    return found


def _matching(checkpoint: Checkpoint, model: nn.Module, name: str) -> dict[str, Tensor]:
    """Returns the tensors of a model by name, after checking that the checkpoint has all of them in the same shapes."""
    saved = checkpoint.content["models"].get(name)
    if saved is None:
        raise unknown(checkpoint, "models", name)
    state = _state_of(model, name)
    missing, unexpected = sorted(state.keys() - set(saved)), sorted(set(saved) - state.keys())
    if missing or unexpected:
        facts = [f"{checkpoint.folder} lacks {some(missing)}"] if missing else []
        facts += [f"the model lacks {some(unexpected)}"] if unexpected else []
        raise other_model(checkpoint, "; ".join(facts))
    for key, tensor in state.items():
        shape = checkpoint.tensors[key].shape
        if tuple(tensor.shape) != shape:
            fact = f"{key} has shape {tuple(tensor.shape)} in the model and {shape} in {checkpoint.folder}"
            raise other_model(checkpoint, fact)
        if tensor.is_meta:
            raise LoadError(
                f"{key} is on meta: it has no memory to load into",
                "a model on the CPU or on the accelerator",
                'model.to_empty(device="cpu")',
            )
    return state


# -- loading: values -------------------------------------------------------------------------------------------------


def _set_values(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Loads the saved values of tensors, wherever they are. See [Note: nothing passes through the controller]."""
    on_workers: dict[Session, dict[StateRef, SavedTensor]] = defaultdict(dict)
    wanted: list[tuple[str, Tensor, TensorSource]] = []
    for name, tensor in tensors.items():
        saved = checkpoint.tensors[name]
        if not isinstance(tensor, VirtualTensor):
            wanted += [(name, tensor.detach(), source) for source in saved.sources]
            continue
        cell = tensor._cell
        if isinstance(cell.value, OnWorkers):
            on_workers[cell.value.owner.session][cell.value.ref] = saved
        elif cell.has_views or isinstance(cell.value, View):  # other tensors share this memory
            with torch.no_grad():
                tensor.detach().copy_(checkpoint.read(name).to(tensor.device))
        else:
            cell.value = checkpoint.unread(name, tensor.dtype)
    posted = [session.outbox.submit(ReadCheckpoint(values)) for session, values in on_workers.items()]
    if wanted:
        read_into(wanted)
    for reply in posted:
        reply.result()
