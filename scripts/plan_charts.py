"""The figures and the bars of the charts of plans: what a device holds under each, by what it is for.

Decides which plans a tutorial's chart compares. Must not know languages, files or the dark; `draw_charts.py` does.
"""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.axes import Axes
from parameter_guide import FLAVOURS_OF_70B, PUBLISHED, SPEEDS
from plan_questions import answer_for

from moreh_ap.cli.plan_output.plan_pictures import PART_COLOURS
from moreh_ap.flavours import FLAVOURS
from moreh_ap.plan import Plan
from moreh_ap.planner.search.candidate import Candidate, evaluate_plan
from moreh_ap.planner.search.planning_task import Task

OF_TUTORIALS = {"gpt": "Cerebras-GPT-13B", "mistral": "Mistral-7B", "llama2": "Llama2-13B"}
"""Tutorials whose chart has the plan of each accelerator of the platform."""

_CHARACTERS_A_LINE = 60
_LINE = 0.3
"""Height of a line of text, in bars."""


def figures_of(tutorial: str) -> dict[str, Any]:
    """Returns what the chart of a tutorial shows: memory of a device in GiB, and its plans with their parts."""
    if tutorial in OF_TUTORIALS:
        rows = [row for row in PUBLISHED if row.model == OF_TUTORIALS[tutorial]]
        asked = [(f"{FLAVOURS[row.flavour]}xMI250", row.batch, row.length) for row in rows]
        answers: dict[str, Any] = {}
        for devices, *batch in asked:
            answers.setdefault(devices, answer_for(rows[0].model, devices, *batch))
    elif tutorial == "llama3-70b":
        flavour, rows_of_step, length = FLAVOURS_OF_70B[-1]
        question = ("Llama3-70B", f"{FLAVOURS[flavour]}xMI250", rows_of_step, length)
        task, chosen = answer_for(*question)
        published = next(plan for model, _, rows, plan, _ in SPEEDS if (model, rows) == (question[0], rows_of_step))
        answers = {"chosen": (task, chosen), "published": (task, evaluate_plan(task, Plan.parse(published)))}
    elif tutorial == "llm":
        machines = [f"{devices}xA100-40GB" for devices in (1, 4, 8)]
        answers = {devices: answer_for("GPT-2-XL", devices, 64, 1024) for devices in machines}
    elif tutorial == "lora":
        answers = {
            "adapters": answer_for("Mistral-7B", "1xA100-40GB", 16, 1024, 16),
            "all weights": answer_for("Mistral-7B", "8xA100-40GB", 16, 1024),
        }
    else:
        raise ValueError(f"no plans for a tutorial {tutorial!r}")
    task = next(iter(answers.values()))[0]
    return {
        "device": task.cluster.device.name,
        "memory": round(task.cluster.device.memory_bytes / 2**30, 1),
        "usable": round(task.usable_bytes / 2**30, 1),
        "plans": [_plan_of(label, *answer) for label, answer in answers.items()],
    }


def _plan_of(label: str, task: Task, answer: Candidate | None) -> dict[str, Any]:
    if answer is None:
        raise ValueError(f"{label}: nothing fits, so there is no plan to show")
    parts = {part: round(num_bytes / 2**30, 1) for part, num_bytes in answer.memory.components}
    total = round(answer.memory.reserved_bytes / 2**30, 1)  # the tables' figure, which rounded parts may miss by 0.1
    return {
        "label": label,
        "devices": task.cluster.num_devices,
        "plan": str(answer.plan),
        "parts": parts,
        "total": total,
    }


def height_of(figures: dict[str, Any]) -> int:
    """Returns how high a chart has to be, in pixels."""
    lines = sum(len(_lines_of(one, {})) for one in figures["plans"])
    return 160 + 34 * len(figures["plans"]) + 16 * lines


def draw_bars(axes: Axes, figures: dict[str, Any], words: dict[str, str], ink: str, soft: str) -> None:
    """Draws a bar for each plan, with its text above it, and how much a device has and may be filled."""
    place, most = 0.0, figures["memory"]
    drawn: dict[str, Any] = {}
    for one in figures["plans"]:
        for number, line in enumerate(_lines_of(one, words)):
            place += _LINE
            weight = "bold" if number == 0 else "normal"
            axes.text(0, place, line, color=ink, fontsize=11, fontweight=weight, va="bottom")
        left = 0.0
        for part, size in one["parts"].items():
            bar = axes.barh(place + 0.3, size, left=left, color=PART_COLOURS[part], height=0.45)
            if size:
                drawn.setdefault(part, bar)
            left += size
        for value, dashes, word in ((figures["usable"], (0, (3, 2)), "may be filled"), (figures["memory"], "-", "has")):
            span = (place + 0.06, place + 0.54)
            (drawn[word],) = axes.plot((value, value), span, color=soft, linewidth=1.5, linestyle=dashes)
        most = max(most, left * 1.1)
        place += 0.75
    axes.set_xlim(0, most * 1.04)
    axes.set_ylim(place, 0)
    axes.set_yticks([])
    axes.set_xlabel(words["gib"].format(device=figures["device"]), color=ink)
    limits = {"may be filled": figures["usable"], "has": figures["memory"]}
    order = [name for name in (*PART_COLOURS, *limits) if name in drawn]
    names = [words[name] + (f": {limits[name]:.1f}" if name in limits else "") for name in order]
    axes.get_figure().legend(
        [drawn[name] for name in order], names, loc="outside lower center", ncols=2, frameon=False, labelcolor=ink,
        fontsize=11,
    )  # fmt: skip


def _lines_of(one: dict[str, Any], words: dict[str, str]) -> list[str]:
    """Returns the text above a bar: what it is, and the plan, whose parts stay whole."""
    head = words.get(one["label"], one["label"].replace("x", " x "))
    plan = textwrap.wrap(one["plan"].replace(",", ", "), _CHARACTERS_A_LINE, break_on_hyphens=False)
    return [f"{head.format(devices=one['devices'])}: {one['total']:.1f} GiB", *plan]
