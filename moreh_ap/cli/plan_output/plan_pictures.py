"""The pictures of `moreh-ap plan`: a memory bar for every stage's device, and the pipeline's timeline.

Decides how they look, in a terminal and as an image. matplotlib is imported only for an image. Must not know how memory
is estimated or an order found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from moreh_ap.errors import UnsupportedError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.memory_footprint import MemoryEstimate, estimate_memory
from moreh_ap.planner.cost.timeline import Bar, simulate, stage_seconds
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.planning_task import Task

PART_COLOURS = {
    "parameters": "#4477aa",
    "gradients": "#66ccee",
    "optimizer": "#228833",
    "activations": "#ccbb44",
    "logits": "#ee6677",
    "temporary": "#aa3377",
    "fragmentation": "#bbbbbb",
}
"""A colour for each part of memory. Source: Paul Tol's "bright" scheme, which colour-blind readers can tell apart."""

ACTION_COLOURS = {"F": "#4477aa", "B": "#228833", "I": "#66ccee", "W": "#ccbb44"}
ACTION_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}

_CELLS_OF_SHORTEST = 2.0
"""Cells of a terminal that the shortest action has at least."""

MOST_DEVICES_SHOWN = 16
"""Rows of a picture; a longer pipeline shows its first and last devices."""


def print_pictures(task: Task, candidate: Candidate) -> None:
    """Prints both pictures to the terminal."""
    console = Console()
    width = max(40, min(console.width, 120) - 16)
    for line in memory_lines(task, candidate, width):
        console.print(line, no_wrap=True, overflow="crop")
    for line in timeline_lines(task, candidate, width):
        console.print(line, no_wrap=True, overflow="crop")


def memory_lines(task: Task, candidate: Candidate, width: int) -> list[Text]:
    """Returns a bar for every position along the pipeline; a full line is the device's whole memory."""
    total = task.cluster.device.memory_bytes
    lines = [_legend("memory of a device", PART_COLOURS)]
    for position, memory in _memories(task, candidate.plan):
        line = Text(f"device {position:>2} ")
        drawn, reached = 0, 0.0
        for label, num_bytes in memory.components:
            reached += num_bytes
            cells = min(width, round(reached / total * width)) - drawn
            line.append("█" * cells, style=PART_COLOURS[label])
            drawn += cells
        line.append("·" * (width - drawn), style="dim")
        line.append(f" {memory.reserved_bytes / 2**30:.1f}")
        lines.append(line)
    usable = task.usable_bytes
    place = min(width - 1, int(usable / total * width))
    lines.append(Text(" " * (10 + place) + f"^ usable: {usable / 2**30:.1f} of {total / 2**30:.1f} GiB"))
    return lines


def timeline_lines(task: Task, candidate: Candidate, width: int) -> list[Text]:
    """Returns a line for every device of the pipeline: what it does when, idle times as dots.

    Where actions would be too short to be seen, the middle is left out.
    """
    if candidate.plan.pipeline == 1:
        return [Text("timeline: without a pipeline every device works all the time")]
    bars = _bars(task, candidate)
    end_s = max(bar.end_s for bar in bars)
    cell_s = min(end_s / width, min(bar.end_s - bar.start_s for bar in bars) / _CELLS_OF_SHORTEST)
    is_cut = end_s > cell_s * width * 1.001
    half = width // 2 - 1
    kinds = {bar.action.kind for bar in bars}
    colours = {ACTION_NAMES[kind]: colour for kind, colour in ACTION_COLOURS.items() if kind in kinds}
    lines = [_legend(f"pipeline, {end_s:.3f} s, {_idle(candidate.plan, bars):.1%} idle", colours)]
    for device in _shown(candidate.plan.pipeline):
        mine = [bar for bar in bars if bar.device == device]
        line = Text(f"device {device:>2} ")
        if is_cut:
            line.append_text(_drawn(mine, 0.0, cell_s, half))
            line.append(" … ", style="dim")
            line.append_text(_drawn(mine, end_s - half * cell_s, cell_s, half))
        else:
            line.append_text(_drawn(mine, 0.0, end_s / width, width))
        lines.append(line)
    return lines


def _drawn(bars: list[Bar], start_s: float, cell_s: float, width: int) -> Text:
    """Returns so many cells of one device's line from `start_s` on; a bar begins with its micro-batch's last digit."""
    line, before, place = Text(), -1, 0
    for cell in range(width):
        middle_s = start_s + (cell + 0.5) * cell_s
        while place < len(bars) and bars[place].end_s <= middle_s:
            place += 1
        if place == len(bars) or bars[place].start_s > middle_s:
            line.append("·", style="dim")
            continue
        action = bars[place].action
        line.append(str(action.micro_batch % 10) if place != before else " ", f"black on {ACTION_COLOURS[action.kind]}")
        before = place
    return line


def save_picture(task: Task, candidate: Candidate, path: Path) -> None:
    """Writes both pictures as one PNG image.

    Raises:
        UnsupportedError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            f"--picture {path} needs matplotlib, which is not installed",
            "--picture without a file, for the terminal",
            "pip install matplotlib",
        ) from error
    plan = candidate.plan
    piped = plan.pipeline > 1
    rows = len(_shown(plan.pipeline))
    height = 1.6 + 0.32 * rows
    figure = Figure(figsize=(11, height * (2 if piped else 1) + 0.9), layout="constrained")
    axes = figure.subplots(2 if piped else 1, 1, squeeze=False)[:, 0]
    cluster = task.cluster
    figure.suptitle(
        f"{task.profile.name} on {cluster.num_devices} x {cluster.device.name}, batch {task.global_batch} x "
        f"{task.profile.sequence_length}\n{plan}",
        fontsize=9,
    )
    _draw_memory(axes[0], task, candidate)
    if piped:
        _draw_timeline(axes[1], task, candidate)
    figure.savefig(path, dpi=120)


def _draw_memory(axis: Any, task: Task, candidate: Candidate) -> None:
    names: list[str] = []
    lefts: dict[str, Any] = {}
    memories = _memories(task, candidate.plan)
    for row, (position, memory) in enumerate(memories):
        names.append(f"device {position}")
        left = 0.0
        for label, num_bytes in memory.components:
            bar = axis.barh(row, num_bytes / 2**30, left=left, color=PART_COLOURS[label], height=0.75)
            lefts.setdefault(label, bar)
            left += num_bytes / 2**30
    total, usable = task.cluster.device.memory_bytes / 2**30, task.usable_bytes / 2**30
    axis.axvline(usable, color="black", linestyle="--", linewidth=1)
    axis.axvline(total, color="black", linewidth=1)
    axis.text(usable, -0.65, f"usable {usable:.1f}", ha="right", va="bottom", fontsize=7)
    axis.text(total, -0.65, f"{total:.1f}", ha="right", va="bottom", fontsize=7)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -1.0)
    axis.set_xlabel("GiB on one device", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(lefts.values(), lefts.keys(), ncols=7, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.14))


def _draw_timeline(axis: Any, task: Task, candidate: Candidate) -> None:
    bars = _bars(task, candidate)
    shown = _shown(candidate.plan.pipeline)
    for row, device in enumerate(shown):
        mine = [bar for bar in bars if bar.device == device]
        spans = [(bar.start_s, bar.end_s - bar.start_s) for bar in mine]
        colours = [ACTION_COLOURS[bar.action.kind] for bar in mine]
        axis.broken_barh(spans, (row - 0.4, 0.8), facecolors=colours, edgecolor="white", linewidth=0.3)
        if len(mine) <= 48:
            for bar in mine:
                middle_s = (bar.start_s + bar.end_s) / 2
                axis.text(middle_s, row, bar.action.micro_batch, ha="center", va="center", fontsize=6, color="white")
    axis.set_yticks(range(len(shown)), [f"device {device}" for device in shown], fontsize=8)
    axis.set_ylim(len(shown) - 0.5, -0.5)
    axis.tick_params(labelsize=8)
    kinds = [kind for kind in ACTION_COLOURS if any(bar.action.kind == kind for bar in bars)]
    said = ", ".join(f"{ACTION_NAMES[kind]} {_COLOUR_WORDS[kind]}" for kind in kinds)
    idle = _idle(candidate.plan, bars)
    axis.set_xlabel(f"seconds; {said}, with the micro-batch; {idle:.1%} idle; messages take no time here", fontsize=8)


_COLOUR_WORDS = {"F": "blue", "B": "green", "I": "light blue", "W": "yellow"}


def _memories(task: Task, plan: Plan) -> list[tuple[int, MemoryEstimate]]:
    return [
        (
            position,
            estimate_memory(task.profile, plan, task.global_batch, task.system, task.coefficients, position=position),
        )
        for position in _shown(plan.pipeline)
    ]


def _bars(task: Task, candidate: Candidate) -> list[Bar]:
    step = candidate.step or task.step_of(candidate.plan)
    return simulate(candidate.plan, stage_seconds(task.profile, candidate.plan, step))


def _idle(plan: Plan, bars: list[Bar]) -> float:
    """Returns the part of all devices' time until the last action ends in which they do nothing."""
    busy_s = sum(bar.end_s - bar.start_s for bar in bars)
    return 1 - busy_s / (max(bar.end_s for bar in bars) * plan.pipeline)


def _shown(pipeline: int) -> list[int]:
    if pipeline <= MOST_DEVICES_SHOWN:
        return list(range(pipeline))
    half = MOST_DEVICES_SHOWN // 2
    return [*range(half), *range(pipeline - half, pipeline)]


def _legend(title: str, colours: dict[str, str]) -> Text:
    line = Text(f"{title}: ")
    for label, colour in colours.items():
        line.append("█ ", style=colour)
        line.append(f"{label}  ")
    return line
