"""The plan of a model at its first call: chosen, and verified if it is not yet verified for the model's family.

Decides when a small copy of the model is trained first, under the plan and in this process, and the error if the
numbers differ. Must not know how a plan is chosen or carried out. The script's random streams, gradients and log of the
plan are as if nothing had been verified.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from moreh_ap.errors import PlanError, UnsupportedError, WorkerLostError
from moreh_ap.local import logger
from moreh_ap.plan import Plan
from moreh_ap.planner.search import verified_kinds
from moreh_ap.protocol.encoding import WorkerTraceback
from moreh_ap.protocol.pytree import flatten
from moreh_ap.protocol.script_code.replaced_forwards import has_another_forward
from moreh_ap.session.models.script_hooks import ScriptHooks
from moreh_ap.session.planning.plan_selection import Planned, choose_plan_for
from moreh_ap.session.rng_streams import AcceleratorGenerator
from moreh_ap.session.session import Session
from moreh_ap.session.verification import equivalence, reduced_model, verified_models
from moreh_ap.session.verification.equivalence import Equivalence

Watcher = Callable[[nn.Module, "reduced_model.Call"], None]

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Inside, `watcher(root, call)` is called at every first call of a model, before it is decided where it runs."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def tell_watcher(root: nn.Module, call: reduced_model.Call) -> None:
    """Tells the watcher of this thread, if there is one, that a model is called for the first time."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(root, call)


def refuse_nested(call: reduced_model.Call) -> None:
    """Refuses nested tensors among the arguments of a model's first call: their sizes are no numbers.

    Raises:
        UnsupportedError: There is one.
    """
    if any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in flatten(call[1:])[0]):
        raise UnsupportedError(
            f"{type(call[0]).__name__} is called with a nested tensor (`torch.nested`) on the accelerator.",
            allowed="Padded tensors with a mask, lists of tensors, and packed sequences.",
            fix="model(batch.to_padded_tensor(0.0), mask)",
        )


def plan_first_call(session: Session, root: nn.Module, call: reduced_model.Call) -> Planned:
    """Returns the plan for a model whose first call is `call`, with its predictions.

    Raises:
        PlanError: No plan fits, or the plan does not give the numbers of one process.
    """
    family = family_of(root)
    planned = choose_plan_for(session, root, family, call, rows_of(call))
    require_verification(session, root, call, planned)
    return planned


def require_verification(session: Session, root: nn.Module, call: reduced_model.Call, planned: Planned) -> None:
    """Verifies the plan on a small copy of the model, unless the plan or the result is already known.

    The copy is trained under the plan and in this process, and the numbers are compared.

    Raises:
        PlanError: The numbers are not those of one process.
        UnsupportedError: Hooks of the script are on the model, which the plan does not allow.
    """
    plan = planned.plan
    ScriptHooks(root, plan)  # refuses, before a copy of the model has run them
    if verified_kinds.kinds_to_verify(plan) and not verified_kinds.is_verified(planned.family, plan):
        _verify_once(session, root, call, plan)


def rows_of(call: reduced_model.Call) -> int | None:
    """Returns the rows of a call's batch; None if no argument has rows."""
    leaves, _ = flatten(call[1:])
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), None)


def family_of(root: nn.Module) -> str:
    """Returns the model's name in the list of verified families; empty if a class or forward is the script's own."""
    if not reduced_model.is_of_libraries(root) or has_another_forward(root):
        return ""
    model_type = getattr(getattr(root, "config", None), "model_type", "")
    return f"{type(root).__module__}.{type(root).__qualname__} {model_type}"


def plan_for_trial(plan: Plan) -> Plan:
    """Returns the plan as a small copy can be tried under it: in float32, its stages as even as possible."""
    recompute = 1 if isinstance(plan.recompute, int) else plan.recompute
    return replace(plan, layers=(), precision="fp32", recompute=recompute, compile="none")


def _verify_once(session: Session, root: nn.Module, call: reduced_model.Call, plan: Plan) -> None:
    trial, name = plan_for_trial(plan), type(root).__name__
    path = next(path for path, submodule in root.named_modules() if submodule is call[0])
    key = verified_models.key_of(root, path, _describe(call), trial)
    found = verified_models.look_up(key)
    if found is None:
        logger.say(
            f'plan="{trial}" is not verified for {name} yet: training a small copy under it and in one process...'
        )
        started_s = time.monotonic()
        found = _verify(session, root, call, trial)
        logger.say(f"{found} ({time.monotonic() - started_s:.0f} s)")
        try:
            verified_models.keep(key, name, found)
        except OSError as error:
            logger.say(f"the result cannot be saved: {error}")
    if not found.is_verified:
        raise _verification_failed(name, plan, found.reason)


def _verify(session: Session, root: nn.Module, call: reduced_model.Call, trial: Plan) -> Equivalence:
    """Trains the small copy on both sides.

    Raises:
        PlanError: The model has no small copy, or the plan is refused for the copy.
    """
    before, session.generator = session.generator, AcceleratorGenerator()
    try:
        with session.trying(trial):
            rows, depth = reduced_model.rows_for(trial), reduced_model.depth_for(trial)
            subject, expected = reduced_model.reduce_call(root, call, rows, depth)
            found = equivalence.measure(subject, expected, trial)
        session.memory(reset_peak=True)  # the copy's memory is not that of the script's model
        return found
    except PlanError as error:
        raise PlanError(error.fact, error.allowed, error.fix or _instead(trial)) from error
    except WorkerLostError:
        raise
    except Exception as error:  # of any class: the copy's forward is the model's code, here and on the workers
        reason = f"a small copy raised {type(error).__name__}: {error}{_where(error)}"
        if trial.tensor > 1:
            reason += ". Code that computes with a whole weight itself, as DoRA's norms do, cannot be split by tensor="
        raise _verification_failed(type(root).__name__, trial, reason) from error
    finally:
        session.generator = before


def _where(error: Exception) -> str:
    """Returns the innermost function that is neither PyTorch's nor ours in the traceback of a worker, in brackets."""
    if not isinstance(error.__cause__, WorkerTraceback):
        return ""
    frames = re.findall(r'^  File "(.+)", line (\d+), in (.+)$', error.__cause__.text, re.MULTILINE)
    others = [frame for frame in frames if not re.search(r"/(torch|moreh_ap)/", frame[0])]
    if not others:
        return ""
    file, line, function = others[-1]
    return f" ({function}, {os.path.basename(file)} line {line}, in a worker)"


def _verification_failed(name: str, plan: Plan, reason: str) -> PlanError:
    return PlanError(
        f"verification of plan={str(plan)!r} failed for {name}: {reason}",
        "replicate and shard, which are exact for every model",
        _instead(plan),
    )


def _instead(plan: Plan) -> str:
    return f'torch.moreh.option.enable_advanced_parallelization(plan="shard={plan.num_devices}")'


def _describe(call: reduced_model.Call) -> str:
    """Returns the nesting of a call's arguments, with the number of dims and the dtype of each tensor."""
    leaves, treespec = flatten(call[1:])
    kinds: list[Any] = [
        f"{leaf.dim()} {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves
    ]
    return f"{treespec} {kinds}"
