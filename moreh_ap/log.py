"""The lines of the log and of the dump files: their wording and order, the platform's where it has such lines.

Decides how the choice of a plan reads in the log (how the start of workers does: `accelerator/start_log.py`). Must not
know how it is done: every function takes what was found and returns text, and only the two writers touch a file. The
planner must not know this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from moreh_ap.local import logger
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import Cluster, Device, Link
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.choice import Choice
from moreh_ap.planner.search.ranking import TIE_MARGIN, Ranking

SELECTED_CONFIG_FILE = "advanced_parallelization_selected_config.dump"
AUTOCONFIG_LOG_FILE = "autoconfig_log.dump"


def choice_lines(choice: Choice) -> list[str]:
    """Returns the lines of the choice of a plan: those of the search, then the plan to paste back, and why."""
    return [*search_lines(choice), plan_line(choice.plan, reason(choice))]


def search_lines(choice: Choice) -> list[str]:
    """Returns the platform's lines of the search for a plan, in order, the selected plan last; times in whole ms."""
    ranking = choice.ranking
    return [
        f"The number of candidates is {len(ranking.candidates)}.",
        "Parallel Graph Compile start...",
        f"Elapsed Time to compile all candidates = {round(ranking.prepare_s * 1000)} [ms]",
        "Parallel Graph Compile finished.",
        f"The number of possible candidates is {max(ranking.num_fitting, 1)}.",
        "SelectBestGraphFromCandidates start...",
        f"Elapsed Time to compute cost for survived candidates = {round(ranking.select_s * 1000)} [ms]",
        "SelectBestGraphFromCandidates finished.",
        "Configuration for parallelism is selected.",
        choice.plan.platform_line(ranking.task.global_batch),
    ]


def plan_line(plan: Plan, reason: str) -> str:
    """Returns the line that says the plan in our own words, so that it can be pasted back, and why it was chosen."""
    return f'plan="{plan}" ({reason})'


def next_plan(plan: Plan) -> str:
    """Returns how a line goes on that says why a plan was left in the middle of a run."""
    return f'Others took over with plan="{plan}"'


def uncompiled_line(reason: str) -> str:
    """Returns the line that says why a model that the script has compiled runs as it is written."""
    return f"compile: the model runs uncompiled: {reason or 'it has no list of equal blocks'}"


def reason(choice: Choice) -> str:
    """Returns why the plan was chosen, with the numbers that decided."""
    if not choice.is_forced:
        return ranking_reason(choice.ranking)
    said = f"it was asked for: {prediction(choice.chosen)}"
    if choice.chosen.fits:
        return said
    return f"{said}; by our estimate it does not fit in {choice.chosen.usable_bytes / 2**30:.2f} GiB"


def ranking_reason(ranking: Ranking) -> str:
    """Returns why the best plan of a search was chosen, with the numbers that decided.

    Raises:
        PlanError: No plan fits.
    """
    best = ranking.best
    looked_at, fitting = ranking.counts
    place = "fastest" if best is ranking.fastest else f"simplest within {TIE_MARGIN:.0%} of the fastest"
    usable = f"{best.usable_bytes / 2**30:.1f} GiB a device"
    return f"{fitting} of {looked_at} plans fit in {usable}, this is the {place}: {prediction(best)}"


def prediction(candidate: Candidate) -> str:
    """Returns the predictions for a timed candidate in short: seconds of a step and GiB reserved on a device."""
    return f"{candidate.seconds:.3g} s a step, {candidate.memory.reserved_bytes / 2**30:.1f} GiB"


def measured_line(chosen: Candidate, seconds: float, peak_bytes: float) -> str:
    """Returns the line that compares the predictions for a timed plan with its first steps.

    Args:
        chosen: The plan with its predictions.
        seconds: Measured seconds of a step.
        peak_bytes: Measured bytes of the fullest device at its peak.
    """
    return _measured(chosen, seconds, peak_bytes)


def tried_line(candidate: Candidate, seconds: float, peak_bytes: float) -> str:
    """Returns the line for a timed plan that was tried for a few steps before one is kept; arguments as above."""
    return f'tried plan="{candidate.plan}": {_measured(candidate, seconds, peak_bytes)}'


def compiled_line(compiled_s: float, written_s: float, compiling_s: float, *, pays: bool) -> str:
    """Returns the line for a plan that was tried with compiled blocks.

    Args:
        compiled_s: Seconds of a step with compiled blocks.
        written_s: Seconds of a step without.
        compiling_s: Seconds that compiling took.
        pays: Whether they are kept.
    """
    kept = "compile=blocks is kept" if pays else "blocks run as written"
    return (
        f"tried compiled blocks: a step takes {compiled_s:.3g} s, {written_s:.3g} s as written; compiling took "
        f"{compiling_s:.3g} s: {kept}"
    )


def compiling_line() -> str:
    """Returns the line for a model whose blocks are compiled after its first steps."""
    return "blocks are compiled now, which takes some seconds: kept if the next steps show that it pays, and remembered"


def not_timed_line() -> str:
    """Returns the line for a model whose steps could not be compared with those of compiled blocks."""
    return (
        "tried compiled blocks: blocks run as written, since a step of one forward and one backward was not timed, "
        "or could not be remembered"
    )


def compiled_before_line(compiled_s: float, written_s: float) -> str:
    """Returns the line for a plan whose blocks are compiled since that paid in earlier runs; arguments as above."""
    return (
        f"blocks are compiled: a step took {compiled_s:.3g} s in an earlier run, {written_s:.3g} s as written "
        "(learned.json)"
    )


def _measured(candidate: Candidate, seconds: float, peak_bytes: float) -> str:
    return (
        f"a step takes {seconds:.3g} s ({candidate.seconds:.3g} s predicted), the fullest device holds "
        f"{peak_bytes / 2**30:.2f} GiB ({candidate.memory.reserved_bytes / 2**30:.2f} GiB predicted)"
    )


def unlikely_rate_line(device: Device, precision: str, found: float) -> str:
    """Says that the rate of a known device was measured to be one that it cannot have.

    Args:
        device: The device.
        precision: The precision.
        found: The measured rate, as a part of the peak.
    """
    return (
        f"{device.name} was measured to reach {found:.0%} of its peak in {precision}: {device.sustained:.0%}, as its "
        "data sheet has it, counts instead"
    )


def measured_links_line(cluster: Cluster) -> str:
    """Says how fast hosts exchange bytes, as it was measured."""

    def said(link: Link) -> str:
        return f"{link.bytes_per_s / 1e6:,.0f} MB/s, {link.latency_s * 1e3:.2g} ms"

    inside = f"; in a host {said(cluster.intra)}" if cluster.devices_per_node > 1 else ""
    return f"sums between {cluster.num_nodes} hosts pass {said(cluster.inter)}{inside} (measured, and remembered)"


def other_devices_line(devices: Mapping[str, str]) -> str:
    """Says that hosts have different devices."""
    found = ", ".join(f"{host}: {name}" for host, name in devices.items())
    return f"the hosts have different devices ({found}): plans are made for the slowest and the smallest"


def slow_hosts_line(slow: Mapping[str, float]) -> str:
    """Says which hosts compute slower than the fastest one."""
    found = ", ".join(f"{host} at {part:.0%}" for host, part in slow.items())
    return f"slower than the fastest host: {found} of its rate; the others wait for it in every step"


def fewer_devices_line(count: int, num_devices: int, fewer_s: float, all_s: float) -> str:
    """Returns the line for a script that uses fewer devices than there are, since they are predicted to be faster.

    Args:
        count: Devices that are used.
        num_devices: Devices of the accelerator.
        fewer_s: Predicted seconds of a step on those that are used.
        all_s: Predicted seconds of a step on all.
    """
    return (
        f"{count} of {num_devices} devices are used: a step is predicted to take {fewer_s:.3g} s on {count}, and "
        f"{all_s:.3g} s on {num_devices} (devices={num_devices} uses all). Other workers start"
    )


def remembered_devices_line(count: int, num_devices: int, all_s: float) -> str:
    """Returns the line for a script whose earlier run chose fewer devices; arguments as above."""
    return (
        f"{count} of {num_devices} devices are used, as in an earlier run of this script: a step was predicted to take "
        f"{all_s:.3g} s on {num_devices} (devices={num_devices} uses all)"
    )


def other_model_line(count: int, num_devices: int) -> str:
    """Returns the line for a script that was given fewer devices for another model than it has now."""
    return (
        f"{num_devices} devices instead of {count} are used: the {count} were chosen in an earlier run of this script "
        "for another model or batch. Other workers start"
    )


def all_devices_line(num_devices: int, why: str) -> str:
    """Returns the line for a script that used fewer devices and uses all from now on.

    Args:
        num_devices: Devices of the accelerator.
        why: The reason.
    """
    return f"all {num_devices} devices are used from now on: {why}. Other workers start"


def kept_devices_line(name: str, count: int, num_devices: int, fewer_s: float, all_s: float) -> str:
    """Returns the line for a second model that would be faster on all devices, while the workers cannot change.

    Args:
        name: Its class.
        count: Devices that are used.
        num_devices: Devices of the accelerator.
        fewer_s: Predicted seconds of a step on those that are used.
        all_s: Predicted seconds of a step on all.
    """
    return (
        f"{name} stays on {count} of {num_devices} devices, which an earlier model uses: a step is predicted to take "
        f"{fewer_s:.3g} s there, and {all_s:.3g} s on {num_devices} (devices={num_devices} uses all from the start)"
    )


def slower_than_all_line(count: int, num_devices: int, seconds: float, all_s: float) -> str:
    """Returns the line for fewer devices whose steps take longer than was predicted for all.

    Args:
        count: Devices that are used.
        num_devices: Devices of the accelerator.
        seconds: Measured seconds of a step.
        all_s: Predicted seconds of a step on all devices.
    """
    return (
        f"a step takes {seconds:.3g} s on {count} devices, and {all_s:.3g} s were predicted for {num_devices}: the "
        "next run of this script chooses the number of devices anew"
    )


def own_step_line(name: str, reason: str) -> str:
    """Returns the line for an optimizer whose steps the workers cannot take; `reason` goes on after its name."""
    return f"{name} steps in the script's process, one operation after the other, which is slower: it {reason}"


def own_process_line(name: str, step_megaflops: float, num_devices: int) -> str:
    """Returns the line for a model that is too small for workers."""
    return (
        f"{name} runs in this process: a step of {step_megaflops:.2g} MFLOP takes less time than messages to "
        f"{num_devices} {'workers' if num_devices > 1 else 'worker'} take (a larger call moves it there)"
    )


def places_line(name: str, here_s: float, on_workers_s: float, num_workers: int, *, is_here: bool) -> str:
    """Returns the line for models whose steps were timed in the script's own process and on workers.

    Args:
        name: Their classes.
        here_s: Seconds of a step in the script's process.
        on_workers_s: Seconds of a step on the workers.
        num_workers: Their number.
        is_here: Whether they run in the script's process from now on.
    """
    here, there = f"{here_s:.3g} s in this process", f"{on_workers_s:.3g} s on {num_workers} workers"
    runs = "run" if ", " in name else "runs"
    if is_here:
        return f"{name} {runs} in this process: a step takes {here}, and {there} (x{on_workers_s / here_s:.2f})"
    return f"{name} {runs} on the workers: a step takes {there}, and {here} (x{here_s / on_workers_s:.2f})"


def first_steps_line(num_done: int, num_steps: int, worst: Mapping[str, tuple[float, str]]) -> str:
    """Returns the line that ends the comparison of the first steps with one device.

    Args:
        num_done: Steps that were compared.
        num_steps: Steps that were asked for.
        worst: The largest relative difference of each kind, and the tensor that has it if one is to be named.
    """
    names = {kind: f" ({name})" if name else "" for kind, (_, name) in worst.items()}
    found = ", ".join(f"{kind} within {relative:.1e}{names[kind]}" for kind, (relative, _) in worst.items())
    return f"MOREH_CHECK={num_steps}: {num_done} steps compared with one device: {found}"


def trace_line(first: int, last: int, file: str, is_early: bool) -> str:
    """Returns the line that says where a trace is.

    Args:
        first, last: The steps in it.
        file: Where it is.
        is_early: Whether the script ended in the last of them.
    """
    steps = f"step {first} is" if first == last else f"steps {first} to {last} are"
    early = f"; the script ended in step {last}" if is_early else ""
    return f"MOREH_TRACE: {steps} in {file}, to be opened at https://ui.perfetto.dev{early}"


def report_line(file: str) -> str:
    """Returns the line that says where the report of the run is."""
    return f"the report of this run: {file}"


def candidate_lines(choice: Choice) -> Iterable[str]:
    """Yields a line with the predictions for each candidate, for detailed logs."""
    for candidate in choice.candidates:
        memory, step = candidate.memory, candidate.step
        verdict = "selected" if candidate.plan == choice.plan else "fits" if candidate.fits else "does not fit"
        seconds = f", {step.total_s * 1000:.1f} ms a step" if step is not None else ""
        components = ", ".join(f"{label} {num_bytes / 2**30:.2f}" for label, num_bytes in memory.components)
        needed = f"{memory.reserved_bytes / 2**30:.2f} GiB of {candidate.usable_bytes / 2**30:.2f}"
        yield f"{candidate.plan} : {needed}{seconds}, {verdict} ({components})"


def write_selected_config(plan: Plan, global_batch: int) -> Path:
    """Writes the selected plan, in the platform's form and in ours, and returns the file's path.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(SELECTED_CONFIG_FILE)
    path.write_text(f"{plan.platform_line(global_batch)}\nplan : {plan}\n", encoding="utf-8")
    return path


def write_autoconfig_log(choice: Choice, path: str | Path = AUTOCONFIG_LOG_FILE) -> Path:
    """Writes the whole search with every candidate and returns the file's path.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path)
    lines = [*choice_lines(choice), *candidate_lines(choice)]
    path.write_text("".join(f"{logger.shown(line)}\n" for line in lines), encoding="utf-8")
    return path
