"""The tables of `moreh-ap plan`.

Decides the columns, their figures and units. Must not know how the figures were found.
"""

from __future__ import annotations

from typing import Literal

from rich.console import Console
from rich.table import Table

from moreh_ap.cli.plan_output import plan_explanation
from moreh_ap.flavours import FLAVOURS, flavour_of
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.planner.search.ranking import Ranking

WIDE = 120
"""Columns of a terminal from which on there is room for all figures."""

_BRACKETS = "In brackets: seconds that computation hides. They are not in the step."

_LEGEND = (
    " computes: forward, backward, recomputation, optimizer. talks: axes and messages, as far as nothing hides them. "
    "waits: bubble, host, fixed."
)

_COLUMNS = ("GiB", "s / step", "tokens/s", "MFU", "computes", "talks", "waits")


def print_ranking(ranking: Ranking, top: int) -> None:
    """Prints the best plans, and the chosen one in the forms that can be pasted."""
    console, task, best = Console(), ranking.task, ranking.best
    looked_at, fitting = ranking.counts
    _print_title(console, task)
    console.print(f"{looked_at} plans looked at, {fitting} fit, {ranking.seconds:.2f} s", highlight=False)
    columns = _COLUMNS if console.width >= WIDE else _COLUMNS[:3]
    table = _table("", "plan", *columns)
    for number, candidate in enumerate(ranking.candidates[:top], 1):
        spaced = str(candidate.plan).replace(",", ", ")  # a long one is broken where a space is
        table.add_row(str(number), spaced, *_figures(candidate)[: len(columns)])
    console.print(table)
    _print_notes(
        console,
        [
            f"GiB: reserved on the fullest device, of {task.usable_bytes / 2**30:.1f} usable."
            + (_LEGEND if len(columns) > 3 else ""),
            *([_in_host_memory(best)] if best.plan.offload == "all" else []),
            f'plan="{best.plan}"',
            best.plan.platform_line(task.global_batch),
        ],
    )


def _in_host_memory(best: Candidate) -> str:
    needed, usable = best.memory.host_bytes / 2**30, best.usable_host_bytes / 2**30
    return f"In host memory, for a device: {needed:.1f} GiB, of {usable:.1f} that the machine is taken to have."


def print_fewer(fewer: Ranking, ranking: Ranking) -> None:
    """Prints that a smaller number of devices would be faster, and its plan."""
    count, everything = fewer.task.cluster.num_devices, ranking.task.cluster.num_devices
    _print_notes(
        Console(),
        [
            f"{count} of the {everything} devices would be faster: {fewer.best.seconds:.3g} s a step, and "
            f"{ranking.best.seconds:.3g} s on {everything}. A script without a number of devices uses {count}:",
            f'plan="{fewer.best.plan}"',
        ],
    )


def print_notes(notes: list[str]) -> None:
    """Prints sentences, each on a line of its own."""
    _print_notes(Console(), notes)


def print_explanation(ranking: Ranking) -> None:
    """Prints where memory and time of the best plan go, and why it is the best."""
    console, best = Console(), ranking.best
    console.print(_components_table([best]))
    _print_notes(
        console, [_BRACKETS, *plan_explanation.sentences(ranking), *plan_explanation.skipped_sentences(ranking)]
    )


def print_comparison(task: Task, candidates: list[Candidate]) -> None:
    """Prints plans side by side, component by component, and what makes the others slower or faster than the first."""
    console = Console()
    _print_title(console, task)
    console.print(_components_table(candidates))
    notes = [_BRACKETS, *(f"{_letter(place)}: {candidate.plan}" for place, candidate in enumerate(candidates))]
    first = candidates[0]
    for place, candidate in enumerate(candidates[1:], 1):
        assert first.step is not None and candidate.step is not None
        ratio = candidate.step.total_s / first.step.total_s - 1
        changes = ", ".join(plan_explanation.differences(first, candidate)) or "no part differs by more than 0.5 %"
        notes.append(f"{_letter(place)} is {abs(ratio):.1%} {'slower' if ratio > 0 else 'faster'} than A: {changes}")
    notes += [f"{_letter(i)} does not fit: it {one.rejected}" for i, one in enumerate(candidates) if not one.fits]
    _print_notes(console, notes)


def _print_title(console: Console, task: Task) -> None:
    profile, cluster = task.profile, task.cluster
    flavour = flavour_of(cluster.num_devices, cluster.device.memory_bytes)
    named = f" ({flavour})" if FLAVOURS.get(flavour) == cluster.num_devices else ""
    nodes = f"{cluster.num_nodes} nodes" if cluster.num_nodes > 1 else "1 node"
    scale, word = (1e9, "billion") if profile.parameters >= 1e9 else (1e6, "million")
    console.print(
        f"{profile.name}, {profile.parameters / scale:.2f} {word} parameters, on {cluster.num_devices} x "
        f"{cluster.device.name}{named}, {nodes}; batch {task.global_batch} x {profile.sequence_length}",
        highlight=False,
        soft_wrap=True,
    )


def _figures(candidate: Candidate) -> tuple[str, ...]:
    memory, step = candidate.memory, candidate.step
    reserved = f"{memory.reserved_bytes / 2**30:.1f}"
    if step is None:
        return reserved, "does not fit", "", "", "", "", ""
    computes = step.forward_s + step.backward_s + step.recompute_s + step.optimizer_s
    talks = step.tensor_s + step.data_s + step.pipeline_s
    waits = step.bubble_s + step.host_s + step.fixed_s
    return (
        reserved,
        f"{step.total_s:.3f}",
        f"{step.tokens_per_s:,.0f}",
        f"{step.mfu:.1%}",
        *(f"{part / step.total_s:.0%}" for part in (computes, talks, waits)),
    )


def _components_table(candidates: list[Candidate]) -> Table:
    """Returns memory and time by component, those that no plan has left out, a column for each plan."""
    table = _table(
        "", "part", *(_letter(place) if len(candidates) > 1 else "predicted" for place in range(len(candidates)))
    )
    memories = [
        parts for parts in zip(*(one.memory.components for one in candidates)) if any(size for _, size in parts)
    ]
    for row, parts in enumerate(memories):
        table.add_row("memory, GiB" if row == 0 else "", parts[0][0], *(f"{size / 2**30:.2f}" for _, size in parts))
    table.add_row("", "allocated", *(f"{one.memory.allocated_bytes / 2**30:.2f}" for one in candidates))
    table.add_row("", "reserved", *(f"{one.memory.reserved_bytes / 2**30:.2f}" for one in candidates), end_section=True)
    if any(one.memory.host_bytes for one in candidates):
        on_host = (f"{one.memory.host_bytes / 2**30:.2f}" for one in candidates)
        table.add_row("", "in host memory", *on_host, end_section=True)
    steps = [candidate.step for candidate in candidates if candidate.step is not None]
    times = [parts for parts in zip(*(step.components for step in steps)) if any(one[1] or one[2] for one in parts)]
    for row, parts in enumerate(times):
        cells = [(f"({hidden:.4f}) " if hidden else "") + f"{seconds:.4f}" for _, seconds, hidden in parts]
        table.add_row("time, s" if row == 0 else "", parts[0][0], *cells)
    table.add_row("", "step", *(f"{step.total_s:.4f}" for step in steps), end_section=True)
    table.add_row("", "tokens/s", *(f"{step.tokens_per_s:,.0f}" for step in steps))
    table.add_row("", "tokens/s a device", *(f"{step.tokens_per_s_per_device:,.1f}" for step in steps))
    table.add_row("", "MFU", *(f"{step.mfu:.1%}" for step in steps))
    return table


def _table(*columns: str) -> Table:
    table = Table(pad_edge=False)
    for place, column in enumerate(columns):
        is_text = place < 2
        justify: Literal["left", "right"] = "left" if is_text else "right"
        table.add_column(column, justify=justify, no_wrap=column != "plan", overflow="fold")
    return table


def _print_notes(console: Console, notes: list[str]) -> None:
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else str(place + 1)
