"""Whether compiled blocks paid in earlier runs of a model on a machine.

Decides by runs that were measured (`learned.json`), by `autotune` or because a script has compiled its model. Must not
know how blocks are compiled.

[Note: measured, not predicted]
The estimate does not say whether compiled blocks are faster: that depends on kernels. So blocks are compiled without
being asked for where two saved runs differ in nothing else: the same model, machine and rows of a step, and the same
plan without. The last run of each kind counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moreh_ap.plan import Plan
from moreh_ap.session.planning.step_watch import runs_of, seconds_of

MOST_OF_WRITTEN = 0.95
"""Part of a step's time that compiled blocks may take at most to be kept: less of a gain may be chance."""
REPAID_AFTER_STEPS = 1000
"""Steps within which compiled blocks have to make up for the time that compiling took."""


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
