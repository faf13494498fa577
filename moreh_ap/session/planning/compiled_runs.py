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

[Note: how long a run will be]
A script does not say how many steps it makes, and a short one should not wait for a compiler. So a trial begins when
the steps as written have taken `WRITTEN_FIRST_S`, and not before the median of the first `LOOKS_AFTER_STEPS` is known.
For that the last of them waits for the workers, once: a script that reads no loss would be many steps ahead otherwise.
A trial leaves a record when it begins. Where the run ended before the trial did, the next run of the model makes twice
as many steps before it tries: a script that is always short meets the compiler once.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

from moreh_ap import log
from moreh_ap.local import logger
from moreh_ap.plan import Plan
from moreh_ap.protocol.messages.models import UseCompiledBlocks
from moreh_ap.session.planning.step_watch import LOOKS_AFTER_STEPS, Expected, Watch, keep_run, runs_of, seconds_of
from moreh_ap.session.session import Session

MOST_OF_WRITTEN = 0.95
"""Part of a step's time that compiled blocks may take at most to be kept: less of a gain may be chance."""
REPAID_AFTER_STEPS = 1000
"""Steps within which compiled blocks have to make up for the time that compiling took."""

LEAST_STEP_S = 0.03
"""Seconds of a step as written from which compiled blocks are tried. See [Note: tried in a run]."""

WRITTEN_FIRST_S = 1.0
"""Seconds that steps as written take before blocks are compiled. See [Note: how long a run will be]."""

_BEGUN_AFTER = "trial_begun_after_steps"


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


def watch_to_try(
    session: Session, owner: str, expected: Expected, done: Callable[[Optimizer, float | None], object]
) -> Watch:
    """Returns a watch that has a model's blocks run compiled after its first steps. See [Note: tried in a run].

    Args:
        session: The session of the workers.
        owner: The model, which was built to compile blocks later.
        expected: The predictions for its plan as written.
        done: What else is called when the first steps are over; it ends the watch.
    """
    return Watch(session.outbox, expected, functools.partial(_try, session, owner, expected, done), waits=True)


def _try(
    session: Session,
    owner: str,
    expected: Expected,
    done: Callable[[Optimizer, float | None], object],
    optimizer: Optimizer,
    step_s: float | None,
) -> None:
    """Has blocks run compiled now, or after further steps; arguments as above, and those of `done`."""
    done(optimizer, step_s)
    written = _last(expected.machine, expected.model, expected.batch, expected.chosen.plan)
    if step_s is None or written is None or written[1] < LEAST_STEP_S or session.watch is not None:
        return
    steps = steps_before(expected, written[1])
    begin = functools.partial(_begin, session, owner, expected, steps)
    if steps > LOOKS_AFTER_STEPS:
        session.watch = _Later(optimizer, steps - LOOKS_AFTER_STEPS, begin)
    else:
        begin()


def steps_before(expected: Expected, written_s: float) -> int:
    """Returns how many steps a model makes before its blocks are compiled. See [Note: how long a run will be].

    Args:
        expected: The predictions for its plan as written.
        written_s: Seconds of a step.
    """
    compiled = str(expected.chosen.plan.with_compiled_blocks())
    wanted: dict[str, Any] = {"model": expected.model, "batch": expected.batch, "plan": compiled}
    runs = [run for run in runs_of(expected.machine) if all(run.get(key) == value for key, value in wanted.items())]
    begun = [run[_BEGUN_AFTER] for run in runs if type(run.get(_BEGUN_AFTER)) is int]
    return max(LOOKS_AFTER_STEPS, math.ceil(WRITTEN_FIRST_S / written_s), 2 * max(begun, default=0))


class _Later:
    """Counts steps until a trial begins.

    Args:
        optimizer: Whose steps count.
        steps: How many there are before.
        begin: Begins the trial.
    """

    def __init__(self, optimizer: Optimizer, steps: int, begin: Callable[[], object]) -> None:
        self._optimizer, self._left, self._begin = weakref.ref(optimizer), steps, begin

    def stepped(self, optimizer: Optimizer) -> None:
        """Counts a step that was sent."""
        self._left -= self._optimizer() is optimizer
        if self._left == 0:
            self._begin()

    def stepped_here(self, optimizer: Optimizer) -> None:
        """Does not count a step of another model, in the script's own process."""


def _begin(session: Session, owner: str, expected: Expected, steps: int) -> None:
    """Has blocks run compiled from the next step on; arguments as above, and the steps that were made before."""
    logger.say(log.compiling_line())
    session.outbox.post_soon(UseCompiledBlocks(owner, True))
    compiled = replace(expected, chosen=replace(expected.chosen, plan=expected.chosen.plan.with_compiled_blocks()))
    run = {"model": compiled.model, "plan": str(compiled.chosen.plan), "batch": compiled.batch, _BEGUN_AFTER: steps}
    keep_run(expected.machine, run)
    decide = functools.partial(_decide, session, owner, expected)
    session.watch = Watch(session.outbox, compiled, decide, waits=True)


def _decide(session: Session, owner: str, expected: Expected, optimizer: Optimizer, step_s: float | None) -> None:
    """Keeps compiled blocks, or has them run as written again; arguments as above."""
    session.stop_watching()
    if step_s is None:
        return
    found = measured(expected.machine, expected.model, expected.batch, expected.chosen.plan)
    if found is None:
        logger.say(log.not_timed_line())
    else:
        logger.say(log.compiled_line(found.compiled_s, found.written_s, found.compiling_s, pays=found.pays))
    if found is None or not found.pays:
        session.outbox.post_soon(UseCompiledBlocks(owner, False))
