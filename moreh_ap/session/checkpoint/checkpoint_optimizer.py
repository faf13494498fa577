"""Optimizers in a training checkpoint: groups, settings and state, by names of parameters.

Decides what of an optimizer is saved and how it is restored, on the workers or in the controller. Must not know the
format of the folder or which process writes tensors.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from moreh_ap.device.tensor import VirtualTensor, place
from moreh_ap.device.values import Cell, InFile
from moreh_ap.errors import LoadError, UnsupportedError
from moreh_ap.protocol.messages.checkpoints import ReadCheckpoint
from moreh_ap.protocol.messages.tensors import SavedTensor, StateRef
from moreh_ap.session.checkpoint.checkpoint_folder import Checkpoint, some, unknown
from moreh_ap.session.checkpoint.checkpoint_values import Encoder, decode
from moreh_ap.session.models.remote_optimizer import send_state
from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import OnWorkers

_NOT_SETTINGS = ("params", "param_names")


def describe_optimizer(optimizer: Optimizer, name: str, names: dict[int, str], encoder: Encoder) -> dict[str, Any]:
    """Returns the entry of an optimizer in `checkpoint.json`; its tensors are left with `encoder`.

    Raises:
        UnsupportedError: A parameter belongs to no saved model, or state has a type that a checkpoint cannot hold.
    """
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key not in _NOT_SETTINGS}
        groups.append(
            {
                "params": [_name_of(parameter, names) for parameter in group["params"]],
                "settings": encoder.encode(settings, f"{name}/group{index}"),
            }
        )
    state = {}
    for parameter, entries in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            raise UnsupportedError(f"{name}.state has the key {parameter!r}", "parameters as keys of optimizer.state")
        key = _name_of(parameter, names)
        state[key] = {entry: encoder.encode(value, f"{name}/{entry}/{key}") for entry, value in entries.items()}
    return {"class": type(optimizer).__qualname__, "groups": groups, "state": state}


def check_groups(checkpoint: Checkpoint, optimizer: Optimizer, name: str, names: dict[int, str]) -> None:
    """Raises if the optimizer has other parameters in its groups than the saved one.

    Args:
        checkpoint: The checkpoint that has it.
        optimizer: The optimizer.
        name: Its name in the checkpoint.
        names: Names of parameters in the checkpoint, by ``id(parameter)``.

    Raises:
        LoadError: The parameters differ, or no optimizer was saved under this name.
    """
    saved = checkpoint.content["optimizers"].get(name)
    if saved is None:
        raise unknown(checkpoint, "optimizers", name)
    groups, here = saved["groups"], optimizer.param_groups
    without = f'moreh_ap.load("{checkpoint.folder}", model=model)  # without the optimizer, which then starts anew'
    if len(groups) != len(here):
        raise LoadError(
            f"{name} has {len(here)} parameter groups, in {checkpoint.folder} it has {len(groups)}",
            "the same groups",
            without,
        )
    for index, (there, group) in enumerate(zip(groups, here)):
        differing = {_name_of(parameter, names) for parameter in group["params"]} ^ set(there["params"])
        if differing:
            raise LoadError(
                f"group {index} of {name} has other parameters than in {checkpoint.folder}: {some(sorted(differing))}",
                "the same parameters in every group",
                without,
            )


def load_optimizer(checkpoint: Checkpoint, optimizer: Optimizer, name: str, names: dict[int, str]) -> None:
    """Loads an optimizer's settings and state, after `check_groups` has passed.

    State of parameters on the accelerator stays in the files until it is needed. Workers that already have the
    parameters read their shards at once.
    """
    saved_optimizer = checkpoint.content["optimizers"][name]
    saved_state = saved_optimizer["state"]
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    for group, saved in zip(optimizer.param_groups, saved_optimizer["groups"]):
        group.update(decode(saved["settings"], checkpoint.read))
        for parameter in group["params"]:
            entries = saved_state.get(names[id(parameter)])
            if entries is not None:
                state[parameter] = {
                    key: _state_value(checkpoint, parameter, entry, on_host=_stays_on_host(key, group))
                    for key, entry in entries.items()
                }
    optimizer.state = state
    session = _session_of(optimizer)
    if session is not None and not send_state(session, optimizer):
        _lay_out_on_workers(session, optimizer)


def _stays_on_host(key: str, group: dict[str, Any]) -> bool:
    """Returns whether PyTorch's optimizers keep this scalar of the state (`step`) in host memory.

    Source: torch/optim/optimizer.py, `_process_value_according_to_param_policy`.
    """
    return key == "step" and not group.get("capturable") and not group.get("fused")


def _state_value(checkpoint: Checkpoint, parameter: Tensor, entry: Any, *, on_host: bool) -> Any:
    def on_device(name: str) -> Tensor:
        if not isinstance(parameter, VirtualTensor):
            return checkpoint.read(name).to(parameter.device)
        saved = checkpoint.tensors[name]
        meta = torch.empty(saved.shape, dtype=saved.dtype, device="meta")
        return VirtualTensor(Cell(checkpoint.unread(name, saved.dtype), parameter.device), meta)

    value = decode(entry, on_device)
    if not isinstance(value, Tensor) or value.dim() > 0 or on_host:
        return value
    return place(value) if isinstance(parameter, VirtualTensor) and parameter.is_cuda else value.to(parameter.device)


def _lay_out_on_workers(session: Session, optimizer: Optimizer) -> None:
    """Has the workers read state of their parameters' shapes, for an optimizer that steps in the controller."""
    values: dict[StateRef, SavedTensor] = {}
    for parameter, entries in optimizer.state.items():
        for key, tensor in entries.items():
            unread = tensor._cell.value if isinstance(tensor, VirtualTensor) else None
            if isinstance(unread, InFile) and tensor.shape == parameter.shape:
                entries[key] = torch.zeros_like(parameter.detach(), dtype=tensor.dtype)
                values[entries[key]._cell.value.ref] = SavedTensor(tensor.dtype, tuple(tensor.shape), unread.sources)
    session.outbox.submit(ReadCheckpoint(values)).result()


def _session_of(optimizer: Optimizer) -> Session | None:
    """Returns the session whose workers hold the optimizer's parameters; None if some are not on the workers."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = [parameter._cell.value if isinstance(parameter, VirtualTensor) else None for parameter in parameters]
    sessions = [value.owner.session for value in values if isinstance(value, OnWorkers)]
    return sessions[0] if sessions and len(sessions) == len(values) else None


def _name_of(parameter: Tensor, names: dict[int, str]) -> str:
    if id(parameter) not in names:
        raise UnsupportedError(
            f"an optimizer has a parameter of shape {tuple(parameter.shape)} that is in no model that was given",
            "optimizers over parameters of the models that are saved or loaded with them",
            "moreh_ap.save(folder, model=model, optimizer=optimizer)",
        )
    return names[id(parameter)]
