"""Tries the best plans for real: trains the script's model on its batch for a few steps under each.

Decides which plans are tried, and which is kept. Must not know how plans are found or carried out. The script's
values, gradients, random streams and training modes are the same afterwards.

[Note: which plans are tried]
The second plan of a ranking is often the first with another number of micro-batches, and both take the same time. A
prediction errs where different costs are compared: kinds of communication, idle stages, recomputation. So the plans
tried differ in the sizes of their axes, each the best with these sizes; if these are too few, others follow in the
order of the ranking.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap import log
from moreh_ap.errors import PlanError
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.protocol.messages.devices import ReportSteps, StepReport
from moreh_ap.session.calls.extended_call import call_remotely
from moreh_ap.session.models.remote_model import RemoteModel
from moreh_ap.session.models.remote_optimizer import step_remotely
from moreh_ap.session.outbox import Restart
from moreh_ap.session.planning import first_call, oom_records
from moreh_ap.session.planning.plan_selection import Planned, say, write_selected
from moreh_ap.session.planning.step_watch import remember_run
from moreh_ap.session.rng_streams import AcceleratorGenerator
from moreh_ap.session.session import Session
from moreh_ap.session.verification import reduced_model

NUM_TRIED = 3
NUM_STEPS = 5
"""The first builds the optimizer's state and finds shapes; it is left out."""


def tune(session: Session, root: nn.Module, call: reduced_model.Call, planned: Planned) -> Planned:
    """Returns the fastest of the best plans, as measured; the planner's choice if no other plan fits or all failed.

    Args:
        session: The session of the workers.
        root: A model that is not on the workers yet.
        call: Its first call.
        planned: The planner's choice, and the other plans that fit.
    """
    to_try = plans_to_try(planned.candidates, NUM_TRIED)
    if len(to_try) < 2:
        return planned
    measured: dict[str, tuple[float, Candidate]] = {}
    for candidate in to_try:
        trial = planned.instead(candidate)
        try:
            first_call.require_verification(session, root, call, trial)
            seconds, peak_bytes = _try(session, root, call, trial)
        except PlanError as error:
            say([log.info(f'plan="{candidate.plan}" is not tried: {error.fact}')])
        except (RuntimeError, MemoryError) as error:
            if not oom_records.is_out_of_memory(error):
                raise
            _note_ran_out(session, trial, error)
        else:
            measured[str(candidate.plan)] = seconds, candidate
            say([log.tried_line(candidate, seconds, peak_bytes)])
            remember_run(trial.expected, seconds, peak_bytes)
    if not measured:
        return planned
    seconds, best = min(measured.values(), key=lambda one: one[0])
    others = "".join(f", {other[0]:.3g} s" for name, other in measured.items() if name != str(best.plan))
    say([log.plan_line(best.plan, f"the fastest of those tried: {seconds:.3g} s a step{others}")])
    write_selected(best.plan, planned.task)
    return planned.instead(best)


def plans_to_try(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Returns the best plans that differ in more than details. See [Note: which plans are tried]."""
    first: dict[Any, Candidate] = {}
    for candidate in candidates:
        plan = candidate.plan
        first.setdefault((plan.replicate, plan.shard, plan.tensor, plan.pipeline), candidate)
    distinct = list(first.values())[:count]
    others = [candidate for candidate in candidates if candidate not in distinct]
    return sorted([*distinct, *others[: count - len(distinct)]], key=candidates.index)


def _try(session: Session, root: nn.Module, call: reduced_model.Call, trial: Planned) -> tuple[float, float]:
    """Returns the seconds of a training step under a plan, and the bytes that the fullest device held."""
    module, args, kwargs = call
    with _untouched(session, root), session.trying(trial.plan):
        session.memory(reset_peak=True)
        remote = RemoteModel(session, root, call, trial.plan, on_trial=True)
        try:
            optimizer = torch.optim.AdamW([p for p in root.parameters() if p.requires_grad], lr=0.0)
            for _ in range(NUM_STEPS):
                with torch.enable_grad():
                    _backward(call_remotely(remote, remote.path_of(module), args, kwargs))
                step_remotely(session, optimizer)
                optimizer.zero_grad()
            reports: list[StepReport] = session.outbox.submit(ReportSteps()).result()
        finally:
            remote.release()
    seconds = max(statistics.median(one.seconds[1:]) for one in reports)
    return seconds, max(one.peak_bytes for one in reports)


def _backward(output: Any) -> None:
    """Backpropagates from the loss in an output, or, without a loss, from every tensor in it."""
    loss = getattr(output, "loss", None)
    tensors = [loss] if isinstance(loss, Tensor) else [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    trainable = [tensor for tensor in tensors if tensor.requires_grad]
    torch.autograd.backward(trainable, [torch.ones(tensor.shape, dtype=tensor.dtype) for tensor in trainable])


@contextlib.contextmanager
def _untouched(session: Session, root: nn.Module) -> Iterator[None]:
    """Restores the state of the model and the accelerator that the script can see."""
    values = [(tensor._cell, tensor._cell.value) for tensor in [*root.parameters(), *root.buffers()]]  # type: ignore[attr-defined]
    modes = [(module, module.training) for module in root.modules()]
    generator, watch = session.generator, session.watch
    session.generator, session.watch = AcceleratorGenerator(), None
    root.train()
    try:
        yield
    finally:
        for cell, value in values:
            cell.value = value
        for module, training in modes:
            module.training = training
        session.generator, session.watch = generator, watch


def _note_ran_out(session: Session, trial: Planned, error: BaseException) -> None:
    oom_records.remember(trial.expected, error)
    say([log.info(f'plan="{trial.plan}" ran out of memory: {oom_records.first_line(error)}')])
    session.outbox.restart(Restart(session.restart_workers(), lambda command: command))
