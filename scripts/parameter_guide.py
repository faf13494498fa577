"""Writes docs/reference/parameter-guide.md and its .ko.md: plan, memory and predicted time of models.

    python scripts/parameter_guide.py            # writes the page in each language, and the tables of tutorials
    python scripts/parameter_guide.py --check    # writes nothing; exits with 1 if a page is not what the planner says

Decides which cells the page has and what stands beside them; `parameter_guide_words.py` has its words. Must not know
how a plan is found. Beside our predictions stand the figures that the platform has published; nothing on the page was
measured by us.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parameter_guide_words import LANGUAGES, Words
from plan_questions import RATIO, answer_for

from moreh_ap.flavours import FLAVOURS
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.memory_footprint import estimate_memory
from moreh_ap.planner.search.candidate import Candidate, evaluate_plan
from moreh_ap.planner.search.planning_task import Task

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "reference" / "parameter-guide.md"


TUTORIALS = ("Cerebras-GPT-13B", "Mistral-7B", "Llama2-13B", "Llama3-70B")
"""Models of tutorials, which have a table each: `docs/shared/flavours`."""


@dataclass(frozen=True)
class Published:
    """A row of the platform's fine-tuning parameter guide."""

    model: str
    flavour: str
    batch: int
    length: int
    memory_mib: int
    minutes: int


def _rows(
    model: str, batches: str, memories: str, minutes: str, flavours: str = "", lengths: str = ""
) -> list[Published]:
    columns = (flavours or "2xLarge.1024GB 4xLarge.2048GB 8xLarge.4096GB", batches, lengths or "1024 1024 1024")
    return [
        Published(model, flavour, int(batch), int(length), int(memory), int(minute))
        for flavour, batch, length, memory, minute in zip(*(column.split() for column in (*columns, memories, minutes)))
    ]


PUBLISHED = [
    *_rows("Llama3-8B", "128 256 1024", "867021 1366564 2089476", "220 140 78"),
    *_rows("Llama2-13B", "128 256 512", "699751 1121814 1853432", "560 249 144"),
    *_rows("Mistral-7B", "256 512 1024", "762652 1147841 1112135", "19 15 16"),
    *_rows("Qwen1.5-7B", "128 256 512", "758555 1403640 1899079", "30 15 14"),
    *_rows("Baichuan2-13B", "128 256 512", "866656 1541212 2845656", "30 28 17"),
    *_rows("Cerebras-GPT-13B", "16 32 16", "1764955 3460240 1951344", "81 62 100",
           "4xLarge.2048GB 8xLarge.4096GB 8xLarge.4096GB", "1024 1024 2048"),
]  # fmt: skip
"""Source: the platform's fine-tuning parameter guide. Memory is the sum over all devices, minutes a whole run."""

SPEEDS = [
    ("Cerebras-GPT-13B", 32, 16, "shard=8,pipeline=4,micro_batches=2,schedule=gpipe,precision=bf16", 6800),
    ("Llama2-13B", 32, 64, "shard=16,pipeline=2,micro_batches=4,precision=bf16", None),
    ("Llama3-70B", 64, 512, "shard=8,pipeline=8,micro_batches=64,recompute=full,precision=bf16", 4062),
    ("Llama3-8B", 8, 16, "", 12900),
    ("Llama3-8B", 32, 64, "", 49000),
    ("Llama3-8B", 32, 512, "", 21500),
]
"""Model, devices, rows of 1,024 tokens, the selected plan in our words where it was published, tokens/s. Source: the
platform's tutorials. `gpipe` stands for 1F1B where there are fewer micro-batches than stages: the order is the same."""

FLAVOURS_OF_70B = [("2xLarge.1024GB", 256, 1024), ("4xLarge.2048GB", 256, 1024), ("8xLarge.4096GB", 512, 1024)]
"""For Llama3-70B the platform has published the last of these alone."""

ADAPTED, RANK = "Mistral-7B", 16
FLAVOURS_OF_ADAPTERS = [("Small.64GB", 16, 1024), ("Large.256GB", 64, 1024), ("xLarge.512GB", 128, 1024)]
"""The model of the LoRA tutorial, and what its table has; the platform has published nothing of adapters."""

MODELS = ("SmolLM2-1.7B", "Mistral-7B", "Llama3-8B", "Llama2-13B", "Qwen2.5-32B", "Llama3-70B")
ACCELERATORS = ("16xMI250", "32xMI250", "64xMI250", "8xA100", "8xH100", "64xH100")
SHAPES = ((256, 1024), (64, 4096))
TOKENS = 256 * 1024
"""Those of a step, in each of these shapes."""


def sum_mib(task: Task, plan: Plan) -> float:
    """Returns what all devices reserve together, in MiB."""
    each = (
        estimate_memory(task.profile, plan, task.global_batch, position=position).reserved_bytes
        for position in range(plan.pipeline)
    )
    return sum(each) * plan.num_devices / plan.pipeline / 2**20


def page_of(words: Words) -> str:
    """Returns the page as text."""
    parts = [words["head"].format(ratio=RATIO), words["own"].format(tokens=f"{TOKENS:,}")]
    for model in MODELS:
        parts += [f"### {model}\n", _table(words["own_columns"], _own(model, words))]
    parts += [words["beside"], _table(words["memory_columns"], _memory(words))]
    parts += [words["times"], _table(words["times_columns"], _times(words))]
    parts += [words["speeds"], _table(words["speeds_columns"], _speeds(words))]
    return "\n".join(parts)


def _table(columns: str, rows: Iterator[str]) -> str:
    return "\n".join((columns, "|---" * (columns.count("|") - 1) + "|", *rows, ""))


def _memory(words: Words) -> Iterator[str]:
    for row in PUBLISHED:
        task, best = answer_for(row.model, f"{FLAVOURS[row.flavour]}xMI250", row.batch, row.length)
        start = f"| {row.model}, {row.flavour} | {row.batch} x {row.length:,} "
        if best is None:
            yield start + f"| {words['nothing_fits']} | | | {row.memory_mib:,} |"
            continue
        sum_of_all = f"{sum_mib(task, best.plan):,.0f}"
        yield start + f"| `{best.plan}` | {_gib(best)} | {sum_of_all} | {row.memory_mib:,} |"


def _times(words: Words) -> Iterator[str]:
    first: dict[str, tuple[float, int]] = {}
    for row in PUBLISHED:
        _, best = answer_for(row.model, f"{FLAVOURS[row.flavour]}xMI250", row.batch, row.length)
        start = f"| {row.model}, {row.flavour} | {row.batch} x {row.length:,} "
        if best is None or best.step is None:
            yield start + f"| {words['nothing_fits']} | | | {row.minutes} | |"
            continue
        speed = best.step.tokens_per_s
        before, minutes = first.setdefault(row.model, (speed, row.minutes))
        yield start + (
            f"| {best.step.total_s:.2f} | {speed:,.0f} | {speed / before:.2f} | {row.minutes} "
            f"| {minutes / row.minutes:.2f} |"
        )


def _gib(candidate: Candidate) -> str:
    return f"{candidate.memory.reserved_bytes / 2**30:.1f}"


def flavours_of(model: str, words: Words, rank: int | None = None) -> str:
    """Returns the table that a tutorial shows of its model: accelerators, batches and tokens a second.

    Args:
        model: Its name in the catalogue.
        words: Those of a language.
        rank: That of adapters; None trains all weights.
    """
    rows = [(row.flavour, row.batch, row.length) for row in PUBLISHED if row.model == model] or FLAVOURS_OF_70B
    rows = FLAVOURS_OF_ADAPTERS if rank else rows
    lines = [words["flavours_columns"], "|---" * (words["flavours_columns"].count("|") - 1) + "|"]
    for flavour, batch, length in rows:
        devices = FLAVOURS[flavour]
        _, best = answer_for(model, f"{devices}xMI250", batch, length, rank)
        start = f"| {flavour} ({devices}) | {batch} x {length:,} "
        if best is None or best.step is None:
            lines.append(start + f"| {words['nothing_fits']} | |")
            continue
        lines.append(start + f"| {_gib(best)} GiB | {best.step.tokens_per_s:,.0f} |")
    return "\n".join((*lines, ""))


def _speeds(words: Words) -> Iterator[str]:
    for model, devices, batch, plan, published in SPEEDS:
        task, ours = answer_for(model, f"{devices}xMI250", batch, 1024)
        title = f"| {model}, {devices}\u00a0x\u00a0MI250, {batch} x 1,024 "
        if plan:
            yield f"{title}| {words['theirs']} | {_cells(evaluate_plan(task, Plan.parse(plan)), words)} |"
            title = "| "
        yield f"{title}| {words['ours']} | {_cells(ours, words)} |"
        if published:
            yield f"| | {words['measured']} | | | {published:,} |"


def _cells(candidate: Candidate | None, words: Words) -> str:
    if candidate is None or candidate.step is None:
        return f"{words['nothing_fits']} | | "
    reserved = _gib(candidate) + ("" if candidate.fits else words["does_not_fit"])
    return f"`{candidate.plan}` | {reserved} | {candidate.step.tokens_per_s:,.0f}"


def _own(model: str, words: Words) -> Iterator[str]:
    """Yields a row for each accelerator and plan; batches that get the same plan share a row."""
    for devices in ACCELERATORS:
        rows: dict[tuple[str, str], list[str]] = {}
        for index, (batch, length) in enumerate(SHAPES):
            _, best = answer_for(model, devices, batch, length)
            fits = best is not None and best.step is not None
            cells = (f"`{best.plan}`", _gib(best)) if fits else (words["nothing_fits"], "")
            speeds = rows.setdefault(cells, [""] * len(SHAPES))
            speeds[index] = f"{best.step.tokens_per_s:,.0f} ({best.step.mfu:.0%})" if fits else ""
        title = devices.replace("x", "\u00a0x\u00a0")  # on one line
        for cells, speeds in rows.items():
            yield "| " + " | ".join((title, *cells, *speeds)) + " |"
            title = ""


def _files() -> Iterator[tuple[Path, str]]:
    for name, words in LANGUAGES.items():
        yield PAGE.with_suffix(f"{name}.md"), page_of(words)
        for model in TUTORIALS:
            yield DOCS / "shared" / "flavours" / f"{model.lower()}{name}.md", flavours_of(model, words)
        yield DOCS / "shared" / "flavours" / f"{ADAPTED.lower()}-lora{name}.md", flavours_of(ADAPTED, words, RANK)


def main() -> int:
    """Writes or checks the pages and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is another")
    options, num_others = parser.parse_args(), 0
    for file, page in _files():
        if not options.check:
            file.write_text(page, encoding="utf-8")
            print(file)
            continue
        same = file.is_file() and file.read_text(encoding="utf-8") == page
        print(f"{file}: {'as the planner says' if same else 'not what the planner says; run this without --check'}")
        num_others += not same
    return 1 if num_others else 0


if __name__ == "__main__":
    sys.exit(main())
