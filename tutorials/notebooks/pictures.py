"""The pictures of the notebooks: losses of several runs, memory, pipelines in time, candidate plans.

Decides how they look; colours are those of `moreh-ap plan --picture`. Must not know where numbers come from. A figure
is shown by the notebook once its cell ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

from moreh_ap.cli.plan_output.plan_pictures import ACTION_COLOURS, ACTION_NAMES, PART_COLOURS
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.timeline import Bar

_MARKERS = ("", "o", "x", "+", "s", "d")


def draw_losses(curves: Mapping[str, Mapping[int, float]], title: str) -> None:
    """Draws runs over each other: the first as a line, the others as marks, so that equal ones can be seen to be equal.

    Args:
        curves: For each label the loss of each step, steps counted from 1.
        title: Text above the plot.
    """
    _, axis = pyplot.subplots(figsize=(5, 3.1), layout="constrained")
    for place, (label, losses) in enumerate(curves.items()):
        style = {"linewidth": 2, "alpha": 0.6} if place == 0 else {"linestyle": "", "marker": _MARKERS[place]}
        axis.plot(list(losses), list(losses.values()), label=label, markersize=5, markerfacecolor="none", **style)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(title=title, xlabel="step", ylabel="loss")
    axis.grid(alpha=0.3)
    axis.legend()


def draw_memory(parts_of: Mapping[str, Mapping[str, float]], usable_bytes: float, title: str) -> None:
    """Draws what the fullest device holds under each plan, by what it is for, and what may be used.

    Args:
        parts_of: For each label the bytes of each part, as `moreh-ap plan --json` names them.
        usable_bytes: What a plan may reserve on a device.
        title: Text above the plot.
    """
    _, axis = pyplot.subplots(figsize=(8, 1.5 + 0.5 * len(parts_of)), layout="constrained")
    lefts = [0.0] * len(parts_of)
    for part, colour in PART_COLOURS.items():
        sizes = [parts[part] / 2**30 for parts in parts_of.values()]
        axis.barh(list(parts_of), sizes, left=lefts, color=colour, height=0.6, label=part)
        lefts = [left + size for left, size in zip(lefts, sizes)]
    axis.axvline(usable_bytes / 2**30, color="black", linestyle="--", linewidth=1, label="usable")
    axis.invert_yaxis()
    axis.set(title=title, xlabel="GiB on the fullest device")
    axis.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.35))


def draw_timelines(played: Mapping[str, tuple[Plan, Sequence[Bar]]]) -> None:
    """Draws what each device of a pipeline does when, one picture for each label, on one scale of time."""
    figure, axes = pyplot.subplots(
        len(played), 1, figsize=(9, 1.7 * len(played) + 0.5), sharex=True, squeeze=False, layout="constrained"
    )
    kinds: set[str] = set()
    for axis, (label, (plan, bars)) in zip(axes[:, 0], played.items()):
        for bar in bars:
            kinds.add(bar.action.kind)
            length = bar.end_s - bar.start_s
            colour = ACTION_COLOURS[bar.action.kind]
            axis.broken_barh([(bar.start_s, length)], (bar.device - 0.4, 0.8), facecolors=colour, edgecolor="white")
            middle_s = bar.start_s + length / 2
            axis.text(middle_s, bar.device, bar.action.micro_batch, ha="center", va="center", fontsize=7, color="white")
        axis.set_title(label, fontsize=10, loc="left")
        axis.set_yticks(range(plan.pipeline), [f"device {device}" for device in range(plan.pipeline)], fontsize=8)
        axis.invert_yaxis()
    axes[-1, 0].set_xlabel("time, in forwards of one stage")
    handles: list[Any] = [
        pyplot.Rectangle((0, 0), 1, 1, color=ACTION_COLOURS[kind]) for kind in ACTION_COLOURS if kind in kinds
    ]
    labels = [ACTION_NAMES[kind] for kind in ACTION_COLOURS if kind in kinds]
    figure.legend(handles, labels, ncols=4, fontsize=8, loc="outside lower center")


def draw_candidates(candidates: Sequence[Mapping[str, Any]], usable_bytes: float, title: str) -> None:
    """Draws plans as points, memory against time of a step; the first one, which is the chosen one, is circled.

    Args:
        candidates: The plans, as `moreh-ap plan --json` gives them.
        usable_bytes: What a plan may reserve on a device.
        title: Text above the plot.
    """
    _, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    groups: dict[str, list[tuple[float, float]]] = {}
    for one in candidates:
        if "step" in one:
            point = (one["memory"]["reserved_bytes"] / 2**30, one["step"]["total_s"])
            groups.setdefault(_axes_of(Plan.parse(one["plan"])), []).append(point)
    for label, colour in zip(sorted(groups), [*PART_COLOURS.values(), "black"]):
        axis.scatter(*zip(*groups[label]), s=18, color=colour, alpha=0.8, label=label)
    best = candidates[0]
    chosen = (best["memory"]["reserved_bytes"] / 2**30, best["step"]["total_s"])
    axis.scatter(*chosen, s=160, facecolors="none", edgecolors="black", linewidths=1.5)
    axis.annotate("chosen", chosen, xytext=(10, -4), textcoords="offset points", fontsize=9)
    axis.axvline(usable_bytes / 2**30, color="black", linestyle="--", linewidth=1)
    axis.set(title=title, xlabel="GiB on the fullest device (dashed: usable)", ylabel="seconds a step")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _axes_of(plan: Plan) -> str:
    """Returns which of tensor and pipeline the plan uses."""
    used = [name for name in ("tensor", "pipeline") if getattr(plan, name) > 1]
    return " and ".join(used) or "replicas and shards only"
