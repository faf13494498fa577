"""Tries the best plans for real: trains the script's model on its batch for a few steps under each.

Decides which plans are tried, and which is kept. Must not know how plans are found or carried out. The script's
values, gradients, random streams and training modes are the same afterwards.

[Note: which plans are tried]
The second plan of a ranking is often the first with another number of micro-batches, and both take the same time. A
prediction errs where different costs are compared: kinds of communication, idle stages, recomputation. So the plans
tried differ in the sizes of their axes, each the best with these sizes; if these are too few, others follow in the
order of the ranking.

[Note: when blocks are compiled]
The estimate does not say whether compiled blocks are faster: that depends on kernels. So the fastest of the plans is
tried once more with compiled blocks, unless the script decides about them or CPU workers have no C++ compiler. They are
kept if a step takes at most 95 per cent of the time, and if that makes up for the compiler's time, which the first step
of the trial shows, within a thousand steps. Where blocks turn out to run as written, a step is no faster. Both times
are saved, so that later runs know without a trial (`compiled_runs.py`).
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap import log
from moreh_ap.errors import PlanError
from moreh_ap.local import logger
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.protocol.messages.devices import ReportSteps, StepReport
from moreh_ap.session.calls.extended_call import call_remotely
from moreh_ap.session.models.remote_model import RemoteModel
from moreh_ap.session.models.remote_optimizer import step_remotely
from moreh_ap.session.planning import first_call, oom_records
from moreh_ap.session.planning.compiled_runs import Measured
from moreh_ap.session.planning.plan_selection import Planned, may_compile, write_selected
from moreh_ap.session.planning.step_watch import remember_run
from moreh_ap.session.replay.restart import Restart
from moreh_ap.session.rng_streams import AcceleratorGenerator
from moreh_ap.session.session import Session
from moreh_ap.session.verification import reduced_model

NUM_TRIED = 3
NUM_STEPS = 5
"""The first builds the optimizer's state and finds shapes; it is left out."""


class StepTimes(NamedTuple):
    """The outcome of a trial of a plan.

    Attributes:
        first_s: Seconds of the first step, in which shapes are found and blocks are compiled.
        seconds: Median of the others.
        peak_bytes: Bytes that the fullest device held.
    """

    first_s: float
    seconds: float
    peak_bytes: float


def tune(session: Session, root: nn.Module, call: reduced_model.Call, planned: Planned) -> Planned:
    """Returns the fastest of the best plans, as measured; the planner's choice if no other plan fits or all failed.

    Args:
        session: The session of the workers.
        root: A model that is not on the workers yet.
        call: Its first call.
        planned: The planner's choice, and the other plans that fit.
    """
    to_try = plans_to_try(planned.candidates, NUM_TRIED)
    if len(to_try) < 2 and not any(may_compile(root, one.plan, session.device_type) for one in to_try):
        return planned
    measured: dict[str, tuple[StepTimes, Candidate]] = {}
    for candidate in to_try:
        trial = planned.instead(candidate)
        try:
            first_call.require_verification(session, root, call, trial)
            times = _try(session, root, call, trial)
        except PlanError as error:
            logger.say(f'plan="{candidate.plan}" is not tried: {error.fact}')
        except (RuntimeError, MemoryError) as error:
            if not oom_records.is_out_of_memory(error):
                raise
            _note_ran_out(session, trial, error)
        else:
            measured[str(candidate.plan)] = times, candidate
            logger.say(log.tried_line(candidate, times.seconds, times.peak_bytes))
            remember_run(trial.expected, *times)
    if not measured:
        return planned
    times, best = min(measured.values(), key=lambda one: one[0].seconds)
    others = "".join(f", {other.seconds:.3g} s" for other, one in measured.values() if one is not best)
    seconds = times.seconds
    if may_compile(root, best.plan, session.device_type):
        seconds, best = _compiled_if_faster(session, root, call, planned.instead(best), times)
    logger.say(log.plan_line(best.plan, f"the fastest of those tried: {seconds:.3g} s a step{others}"), logger.NOTICE)
    write_selected(best.plan, planned.task)
    return planned.instead(best)


def _compiled_if_faster(
    session: Session, root: nn.Module, call: reduced_model.Call, written: Planned, times: StepTimes
) -> tuple[float, Candidate]:
    """Returns the seconds of a step and the plan, with compiled blocks if they pay.

    Args:
        session: The session of the workers.
        root: The model.
        call: Its first call.
        written: The plan without.
        times: Its times.
    """
    compiled = written.instead(replace(written.chosen, plan=written.plan.with_compiled_blocks()))
    try:
        found = _try(session, root, call, compiled)
    except (RuntimeError, MemoryError) as error:
        if not oom_records.is_out_of_memory(error):
            raise
        _note_ran_out(session, compiled, error)
        return times.seconds, written.chosen
    remember_run(compiled.expected, *found)
    measured = Measured(times.seconds, found.seconds, max(0.0, found.first_s - times.first_s))
    logger.say(log.compiled_line(measured.compiled_s, measured.written_s, measured.compiling_s, pays=measured.pays))
    return (found.seconds, compiled.chosen) if measured.pays else (times.seconds, written.chosen)


def plans_to_try(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Returns the best plans that differ in more than details. See [Note: which plans are tried]."""
    first: dict[Any, Candidate] = {}
    for candidate in candidates:
        plan = candidate.plan
        first.setdefault((plan.replicate, plan.shard, plan.tensor, plan.pipeline), candidate)
    distinct = list(first.values())[:count]
    others = [candidate for candidate in candidates if candidate not in distinct]
    return sorted([*distinct, *others[: count - len(distinct)]], key=candidates.index)


def _try(session: Session, root: nn.Module, call: reduced_model.Call, trial: Planned) -> StepTimes:
    """Returns what training steps take under a plan."""
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
            reports: Sequence[StepReport] = session.outbox.submit(ReportSteps()).result()
        finally:
            remote.release()
    return StepTimes(
        first_s=max(one.seconds[0] for one in reports),
        seconds=max(statistics.median(one.seconds[1:]) for one in reports),
        peak_bytes=max(one.peak_bytes for one in reports),
    )


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
    logger.say(f'plan="{trial.plan}" ran out of memory: {oom_records.first_line(error)}')
    session.outbox.restart(Restart(session.restart_workers(), lambda command: command))
