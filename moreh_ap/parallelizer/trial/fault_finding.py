"""Why a trial raised an error: because the script's forward cannot run on the rows that were tried, or by our fault.

Decides whose error it is: the same rows run once more as on one device, without what a trial puts around a forward. If
that raises an error too, no device could run the forward on them; if not, what was put around it is at fault. A check
of the forward's own (``raise ValueError`` for a size that is not the expected one) is none: it says that the rows are
not to be dealt as was tried. Must not know what follows from either (`split_check.py`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from moreh_ap.errors import MorehError
from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.data.fsdp import recover
from moreh_ap.parallelizer.data.opened_blocks import BlocksOpened
from moreh_ap.parallelizer.loss.diverged import Diverged
from moreh_ap.parallelizer.pipeline.stage_transfers import StageFailed
from moreh_ap.parallelizer.rng.shared_draws import UnsharedDraw
from moreh_ap.parallelizer.trial.agreement import everywhere, worst
from moreh_ap.parallelizer.trial.dry_run import Refused

_REFUSALS = (Refused, UnsharedDraw)
_ON_PURPOSE = (Diverged, MorehError, StageFailed)
"""Further exceptions that the code of a trial raises on purpose."""


class Outcome(IntEnum):
    """How a trial went, the worst last: what any worker found counts for all."""

    DONE = 0
    REFUSED = 1
    CANNOT_RUN = 2
    FAULT = 3


@dataclass(frozen=True)
class Finding:
    """How a step of a trial went; `outcome` is the same on every worker.

    Attributes:
        outcome: Whether it was done; refused, since the forward does not do what was tried; raised an error that the
            forward raises on one device too; or raised an error that is a fault of ours.
        reason: Why it was not done, in words for the log; empty where it was.
        fault: Of an error that is ours, its traceback on this worker; empty without.
    """

    outcome: Outcome
    reason: str = ""
    fault: str = ""


def try_out(step: Callable[[], None], again: Callable[[], None], call: Call) -> Finding:
    """Runs a step of a trial. A collective.

    Args:
        step: What to try.
        again: Runs the rows that the step ran last as on one device.
        call: What is being tried.

    Raises:
        Exception: The step raised it here alone, and others have not come through.
    """
    own, reason, fault = Outcome.DONE, "", ""
    raised: Exception | None = None
    without_fault = Outcome.FAULT  # what an error is that one device does not raise
    try:
        step()
    except _REFUSALS as refusal:
        own, reason = Outcome.REFUSED, str(refusal)
    except BlocksOpened:
        raise  # the trial begins again
    except Exception as error:  # any error, of the script's forward or of what is put around it
        recover(call.module)
        own = Outcome.REFUSED if isinstance(error, _ON_PURPOSE) else Outcome.FAULT
        without_fault = Outcome.REFUSED if _is_own_check(error) else Outcome.FAULT
        fault = "".join(traceback.format_exception(error)) if own is Outcome.FAULT else ""
        raised = error if own is Outcome.FAULT else None
        kind = "" if isinstance(error, StageFailed) else f"{type(error).__name__}: "
        first_line = str(error).partition("\n")[0]
        reason = f"the forward of a few rows raised {kind}{first_line}"
    if not everywhere(own is not Outcome.FAULT, call, raised):
        raises_again = not _runs(again, call)  # on every worker: what is sharded is gathered by all at once
        if own is Outcome.FAULT:
            own = Outcome.CANNOT_RUN if raises_again else without_fault
            fault = fault if own is Outcome.FAULT else ""
    outcome = Outcome(worst(own, call))
    return Finding(outcome, reason or _OF_OTHERS[outcome], fault)


_OF_OTHERS = {
    Outcome.DONE: "",
    Outcome.REFUSED: "another worker found that rows depend on each other",
    Outcome.CANNOT_RUN: "the forward of a few rows raised an error on another worker",
    Outcome.FAULT: "the forward of a few rows raised an error on another worker",
}


def _is_own_check(error: Exception) -> bool:
    """Returns whether the code of a forward, which is neither PyTorch's nor ours, has raised the error of a check."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    package = "" if frames is None else str(frames.tb_frame.f_globals.get("__name__")).partition(".")[0]
    return isinstance(error, (ValueError, AssertionError)) and package not in ("", "torch", "moreh_ap")


def _runs(again: Callable[[], None], call: Call) -> bool:
    try:
        again()
    except Refused:
        return True
    except Exception:  # whatever the script's forward raises for these rows
        recover(call.module)
        return False
    return True
