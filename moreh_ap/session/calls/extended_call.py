"""Calls of models whose scripts use more than plain calls, and the first calls of all others (`CallExtensions`).

Hooks of the script run once more on the result, attributes that forwards set are set in the controller too, a forward
that reads attributes of earlier forwards gets them as arguments, and a cache that was passed is the object that comes
back. If one of these requires it, the call is repeated from the same state of the random generators. Calls that use
none of this do not come through this module: `remote_call.call_on_route`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_unflatten

from moreh_ap.integrations.transformers_worker import hand_caches_back
from moreh_ap.protocol.objects.listed_rows import set_apart
from moreh_ap.protocol.objects.returned_arguments import hand_back
from moreh_ap.protocol.rng_state import Streams
from moreh_ap.session.calls import double_backward, output_watchers, row_shard_rules
from moreh_ap.session.calls.answer_check import HasOtherLists, MakesMembers, ReadsPassedState
from moreh_ap.session.calls.remote_call import Call, send_call
from moreh_ap.session.models.remote_model import RemoteModel
from moreh_ap.session.models.script_hooks import RunsInScriptOnly


class ExtendedCalls:
    """Implements `CallExtensions`."""

    def finish(
        self, call: Call, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], hooks_done: int = 0
    ) -> Any:
        model, structure = call.model, call.structure
        assert structure is not None
        result = tree_unflatten(leaves, structure.treespec)
        if structure.is_report:
            result = model.script_hooks.run(call, structure.treespec, result, len(leaves), hooks_done)
        if structure.has_cache and call.takes_cache:
            hand_caches_back((*args, *kwargs.values()), result)
        if structure.returned is not None:
            result = hand_back(structure.returned, args, kwargs, result)
        if model.untold.names or model.untold.warnings:
            model.tell_untold()
        return result

    def watch_output(
        self, call: Call, output: int, watcher: Callable[[Tensor], object], adds_up: bool = False
    ) -> output_watchers.RemovableWatcher | None:
        return output_watchers.watch_output(call, output, watcher, adds_up)

    def differentiate(
        self, call: Call, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        return double_backward.differentiate(call, gradients, inputs)

    def run_on_row_shards(self, func: Any, args: Any, kwargs: Any) -> Any:
        return row_shard_rules.run_on_row_shards(func, args, kwargs)


def call_remotely(
    model: RemoteModel, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], hooks_done: int = 0
) -> Any:
    """Runs the submodule at `path` of `model` on the workers; returns its result, whose tensors are promises.

    Args:
        model: The model.
        path: The path of the submodule.
        args: Positional arguments.
        kwargs: Keyword arguments.
        hooks_done: How many hooks of the script have run already, see `script_hooks.RunsInScriptOnly`.

    Raises:
        MakesMembers: The forward adds something to the model.
        Exception: The forward raised it on a worker; its type is kept. Raised here if the result was waited for;
            otherwise it is raised by the next call or read.
    """
    generator = model.session.generator
    random_state = (generator.state(), generator.streams()) if model.may_be_called_again() else None
    passed_state = model.passed_state(path) if model.passes_state else {}
    sent = (args, kwargs)
    if model.signatures.lists_rows.get(path, True):
        sent = _with_listed_rows(model, path, args, kwargs)
    try:
        call, _, leaves = send_call(model, path, sent[0], {**sent[1], **passed_state})
    except HasOtherLists:
        _draw_again(model, random_state)
        model.signatures.lists_rows[path] = False
        return call_remotely(model, path, args, kwargs, hooks_done)
    except ReadsPassedState as forward:
        _draw_again(model, random_state)
        model.pass_on(path, forward.names)
        return call_remotely(model, path, args, kwargs, hooks_done)
    except MakesMembers:
        _draw_again(model, random_state)
        raise
    try:
        return model.session.extensions.finish(call, leaves, args, kwargs, hooks_done)
    except RunsInScriptOnly as hook:
        model.session.script_only_hooks.add(hook.key)
        _draw_again(model, random_state)
        model.note_structure()
        raise


def _with_listed_rows(
    model: RemoteModel, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with lists of rows as tensors, where the first call of the module had any."""
    plan, signatures = model.plan, model.signatures
    can_travel = plan.pipeline == plan.micro_batches == 1  # else the forward is followed without values
    found = set_apart(args, kwargs) if can_travel else None
    if signatures.lists_rows.setdefault(path, found is not None):
        signatures.passes_more = True
    return (args, kwargs) if found is None else found


def _draw_again(model: RemoteModel, random_state: tuple[bytes, Streams] | None) -> None:
    """Restores the random state from which a call drew, before the call is repeated."""
    if random_state is not None:
        model.session.generator.set_state(random_state[0])
        model.session.generator.go_on_from(random_state[1])
