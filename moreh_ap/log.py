"""The platform's log lines and dump files: their wording and order.

Decides what is printed about start-up and about the choice of a plan. Must not know how either is done: every
function takes values and returns text, and only the two writers touch a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from moreh_ap.plan import Plan
from moreh_ap.planner.search import explain

if TYPE_CHECKING:
    from moreh_ap.planner.search.choice import Choice
    from moreh_ap.planner.search.ranking import Candidate

SELECTED_CONFIG_FILE = "advanced_parallelization_selected_config.dump"
AUTOCONFIG_LOG_FILE = "autoconfig_log.dump"


def info(text: str) -> str:
    """Returns `text` as a log line."""
    return f"[info] {text}"


def requesting_line() -> str:
    """Returns the first line of all, before anything is started."""
    return info("Requesting resources for MoAI Accelerator...")


def daemon_line() -> str:
    """Returns the line for the start of the worker processes."""
    return info("Initializing the worker daemon for MoAI Accelerator")


def connecting_line(index: int, total: int, address: str) -> str:
    """Returns the line for worker `index` of `total`, counted from 1; `address` is `host:port`."""
    return info(f"[{index}/{total}] Connecting to resources on the server ({address})...")


def links_line() -> str:
    """Returns the line for joining the process groups."""
    return info("Establishing links to the resources...")


def ready_line() -> str:
    """Returns the line that says the accelerator can be used."""
    return info("MoAI Accelerator is ready to use.")


def version_line(version: str) -> str:
    """Returns the line that names our version."""
    return info(f"Moreh Version: {version}")


def job_line(job_id: int | str) -> str:
    """Returns the line that names the job."""
    return info(f"Moreh Job ID: {job_id}")


def startup_lines(addresses: list[str], version: str, job_id: int | str) -> list[str]:
    """Returns all lines of a start-up whose workers have these addresses, in order."""
    connecting = [connecting_line(index, len(addresses), address) for index, address in enumerate(addresses, 1)]
    return [
        requesting_line(),
        daemon_line(),
        *connecting,
        links_line(),
        ready_line(),
        version_line(version),
        job_line(job_id),
    ]


def search_lines(
    *, num_candidates: int, num_possible: int, prepare_s: float, select_s: float, plan: Plan, global_batch: int
) -> list[str]:
    """Returns the lines of the search for a plan, in order, the selected plan last.

    Args:
        num_candidates: Plans that were looked at.
        num_possible: Plans among them that fit.
        prepare_s: Seconds spent making candidates; logged in whole milliseconds.
        select_s: Seconds spent weighing them.
        plan: The selected plan.
        global_batch: Rows of the batch.
    """
    return [
        info(f"The number of candidates is {num_candidates}."),
        info("Parallel Graph Compile start..."),
        info(f"Elapsed Time to compile all candidates = {round(prepare_s * 1000)} [ms]"),
        info("Parallel Graph Compile finished."),
        info(f"The number of possible candidates is {num_possible}."),
        info("SelectBestGraphFromCandidates start..."),
        info(f"Elapsed Time to compute cost for survived candidates = {round(select_s * 1000)} [ms]"),
        info("SelectBestGraphFromCandidates finished."),
        info("Configuration for parallelism is selected."),
        info(plan.platform_line(global_batch)),
    ]


def plan_line(plan: Plan, reason: str) -> str:
    """Returns the line that says the plan in our own words, so that it can be pasted back, and why it was chosen."""
    return info(f'plan="{plan}" ({reason})')


def measured_line(chosen: Candidate, seconds: float, peak_bytes: float) -> str:
    """Returns the line that compares what was predicted for a timed plan with what was measured in its first steps."""
    return info(_measured(chosen, seconds, peak_bytes))


def tried_line(candidate: Candidate, seconds: float, peak_bytes: float) -> str:
    """Returns the line for a timed plan that was tried for a few steps before one is kept."""
    return info(f'tried plan="{candidate.plan}": {_measured(candidate, seconds, peak_bytes)}')


def _measured(candidate: Candidate, seconds: float, peak_bytes: float) -> str:
    assert candidate.step is not None
    return (
        f"a step takes {seconds:.3g} s ({candidate.step.total_s:.3g} s predicted), the fullest device holds "
        f"{peak_bytes / 2**30:.2f} GiB ({candidate.memory.reserved_bytes / 2**30:.2f} GiB predicted)"
    )


def candidate_lines(choice: Choice) -> Iterable[str]:
    """Yields a line for each candidate with what is predicted for it, for detailed logs."""
    for candidate in choice.candidates:
        memory, step = candidate.memory, candidate.step
        verdict = "selected" if candidate.plan == choice.plan else "fits" if candidate.fits else "does not fit"
        seconds = f", {step.total_s * 1000:.1f} ms a step" if step is not None else ""
        parts = ", ".join(f"{label} {round(num_bytes)}" for label, num_bytes in explain.memory_parts(memory))
        yield info(
            f"{candidate.plan} : {round(memory.reserved_bytes)} bytes of {round(candidate.usable_bytes)}{seconds}, "
            f"{verdict} ({parts})"
        )


def write_selected_config(plan: Plan, global_batch: int, path: str | Path = SELECTED_CONFIG_FILE) -> Path:
    """Writes the selected plan, in the platform's form and in ours, and returns the file's path.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path)
    path.write_text(f"{plan.platform_line(global_batch)}\nplan : {plan}\n", encoding="utf-8")
    return path


def write_autoconfig_log(choice: Choice, path: str | Path = AUTOCONFIG_LOG_FILE) -> Path:
    """Writes the whole search with every candidate and returns the file's path.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path)
    lines = [*choice.lines, plan_line(choice.plan, choice.reason), *candidate_lines(choice)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
