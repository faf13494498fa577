"""Results of calls whose forwards left more than their outputs: what hooks saw, attributes, caches."""

from __future__ import annotations

from typing import Any, Protocol

from torch.utils._pytree import tree_unflatten

from moreh_ap.integrations.transformers_worker import hand_caches_back
from moreh_ap.session.models.remote_model import RemoteModel
from moreh_ap.session.models.script_hooks import HookedCall
from moreh_ap.session.models.signatures import Structure


class FinishedCall(HookedCall, Protocol):
    """A call whose result is known."""

    takes_cache: bool


def finish_call(
    model: RemoteModel,
    call: FinishedCall,
    structure: Structure,
    leaves: list[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    hooks_done: int = 0,
) -> Any:
    """The result of a call from its leaves, once what its forward left beside it has been dealt with here.

    Raises:
        RunsInScriptOnly: A hook of the script has raised in the workers and not here.
        Exception: What a hook raises here.
    """
    result = tree_unflatten(leaves, structure.treespec)
    if structure.is_report:
        result = model.script_hooks.run(call, structure.treespec, result, len(leaves), hooks_done)
    if structure.has_cache and call.takes_cache:
        hand_caches_back((*args, *kwargs.values()), result)
    if model.left_out:
        model.warn_of_attributes()
    return result
