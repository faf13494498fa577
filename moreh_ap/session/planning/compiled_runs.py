"""Whether compiled blocks paid in earlier runs of a model on a machine.

Decides by runs that were measured (`learned.json`), by `autotune` or because a script has compiled its model. Must not
know how blocks are compiled.

[Note: measured, not predicted]
The estimate does not say whether compiled blocks are faster: that depends on kernels. So blocks are compiled without
being asked for where two saved runs differ in nothing else: the same model, machine and rows of a step, and the same
plan without. The last run of each kind counts.

[Note: tried in a run]
GPU workers try compiled blocks where nothing is known of them yet: after the first steps as written, blocks run
compiled, and what as many steps show decides. The weights do not move, and no step is made twice. Compiling takes 10 to
20 s, so steps that are shorter than `LEAST_STEP_S` are left alone: within `REPAID_AFTER_STEPS`, half of a step saved
would not make up for it. Models that draw random numbers are, too: compiled dropout has other masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

from moreh_ap import log
from moreh_ap.local import logger
from moreh_ap.plan import Plan
from moreh_ap.protocol.messages.models import UseCompiledBlocks
from moreh_ap.session.planning.step_watch import Expected, Watch, runs_of, seconds_of
from moreh_ap.session.session import Session

MOST_OF_WRITTEN = 0.95
"""Part of a step's time that compiled blocks may take at most to be kept: less of a gain may be chance."""
REPAID_AFTER_STEPS = 1000
"""Steps within which compiled blocks have to make up for the time that compiling took."""

LEAST_STEP_S = 0.03
"""Seconds of a step as written from which compiled blocks are tried. See [Note: tried in a run]."""


@dataclass(frozen=True)
class Measured:
    """A plan as it was run with compiled blocks and without.

    Attributes:
        written_s: Seconds of a step as written.
        compiled_s: Seconds of a step with compiled blocks.
        compiling_s: Seconds that the first step took longer with them.
    """

    written_s: float
    compiled_s: float
    compiling_s: float

    @property
    def pays(self) -> bool:
        """Whether compiled blocks are kept."""
        is_faster = self.compiled_s <= MOST_OF_WRITTEN * self.written_s
        return is_faster and self.compiling_s <= REPAID_AFTER_STEPS * (self.written_s - self.compiled_s)


def measured(machine: str, model: str, batch: int, plan: Plan) -> Measured | None:
    """Returns what was measured of a plan with compiled blocks and without; None if one of them was not.

    Args:
        machine: The name under which the machine's runs are saved.
        model: Name of the model.
        batch: Rows of a step.
        plan: The plan without compiled blocks.
    """
    written = _last(machine, model, batch, plan)
    compiled = _last(machine, model, batch, plan.with_compiled_blocks())
    if written is None or compiled is None:
        return None
    (written_first_s, written_s), (compiled_first_s, compiled_s) = written, compiled
    return Measured(written_s, compiled_s, max(0.0, compiled_first_s - written_first_s))


def _last(machine: str, model: str, batch: int, plan: Plan) -> tuple[float, float] | None:
    """Returns the seconds of the first step and of the others in the last run of a plan, None if there is none."""
    wanted: dict[str, Any] = {"model": model, "batch": batch, "plan": str(plan)}
    for run in reversed(runs_of(machine)):
        if all(run.get(key) == value for key, value in wanted.items()):
            first_s, others_s = seconds_of(run, "first_s"), seconds_of(run, "measured_s")
            if first_s is not None and others_s is not None:
                return first_s, others_s
    return None


def try_compiled(
    session: Session,
    owner: str,
    expected: Expected,
    done: Callable[[Optimizer, float | None], object],
    optimizer: Optimizer,
    step_s: float | None,
) -> None:
    """Has a model's blocks run compiled after its first steps. See [Note: tried in a run].

    Args:
        session: The session of the workers.
        owner: The model, which was built to compile blocks later.
        expected: The predictions for its plan as written.
        done: What else is called when the first steps are over; it ends the watch.
        optimizer: The optimizer that stepped.
        step_s: Seconds from one step to the next; None if workers failed.
    """
    done(optimizer, step_s)
    written = _last(expected.machine, expected.model, expected.batch, expected.chosen.plan)
    if step_s is None or written is None or written[1] < LEAST_STEP_S or session.watch is not None:
        return
    logger.say(log.compiling_line())
    session.outbox.post_soon(UseCompiledBlocks(owner, True))
    compiled = replace(expected, chosen=replace(expected.chosen, plan=expected.chosen.plan.with_compiled_blocks()))
    session.watch = Watch(session.outbox, compiled, functools.partial(_decide, session, owner, expected))


def _decide(session: Session, owner: str, expected: Expected, optimizer: Optimizer, step_s: float | None) -> None:
    """Keeps compiled blocks, or has them run as written again; arguments as above."""
    session.stop_watching()
    if step_s is None:
        return
    found = measured(expected.machine, expected.model, expected.batch, expected.chosen.plan)
    if found is not None:
        logger.say(log.compiled_line(found.compiled_s, found.written_s, found.compiling_s, pays=found.pays))
    if found is None or not found.pays:
        session.outbox.post_soon(UseCompiledBlocks(owner, False))
