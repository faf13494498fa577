"""Writes the tables of docs/cookbook.md and its .ko.md: plans by model size and machine, in full and with adapters.

    python scripts/cookbook.py            # writes the tables into the page of each language
    python scripts/cookbook.py --check    # writes nothing; exits with 1 if a page is not what the planner says

Decides which models and machines the page has and how an answer reads. Everything outside of the two marks is written
by hand. Must not know how a plan is found.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from plan_questions import answer_for

PAGE = Path(__file__).parents[1] / "docs" / "cookbook.md"
BEGIN, END = "<!-- plans: written by scripts/cookbook.py -->", "<!-- end of plans -->"

MODELS = {
    "1B": "Llama3.2-1B",
    "3B": "Llama3.2-3B",
    "8B": "Llama3-8B",
    "14B": "Qwen2.5-14B",
    "32B": "Qwen2.5-32B",
    "70B": "Llama3-70B",
}
MACHINES = ("1xRTX 4090", "8xRTX 4090", "1xA100-80GB", "8xA100-80GB", "8xH100-80GB", "64xH100-80GB")
ROWS, LENGTH, RANK = 8, 2048, 16
"""Rows of a step for each device, tokens of a row, rank of adapters."""

MOST_DEVICES = 64
"""How far it is looked for a number of devices that is enough."""


class Words(NamedTuple):
    """The words of the tables in one language."""

    columns: str
    full: str
    lora: str
    enough: str
    too_large: str
    host: str


LANGUAGES = {
    "": Words(
        "| machine | trained | plan | a device holds | step |",
        "all weights",
        "LoRA",
        "does not fit; {devices} are enough",
        f"does not fit, nor on {MOST_DEVICES}",
        "{device:.1f} GiB, and {host:.0f} GiB of its host",
    ),
    ".ko": Words(
        "| 장비 | 학습 대상 | 플랜 | 장치 하나의 메모리 | 스텝 |",
        "모든 가중치",
        "LoRA",
        "들어가지 않음. {devices}개면 들어감",
        f"들어가지 않음. {MOST_DEVICES}개로도 부족함",
        "{device:.1f} GiB와 호스트의 {host:.0f} GiB",
    ),
}


def tables_of(words: Words) -> str:
    """Returns a section for each model: its name and the rows of its machines."""
    parts = []
    for size, model in MODELS.items():
        rows = [_row(model, machine, rank, words) for machine in MACHINES for rank in (None, RANK)]
        rule = "|---" * (words.columns.count("|") - 1) + "|"
        parts.append("\n".join([f"### {size}: {model} {{ #{size.lower()} }}", "", words.columns, rule, *rows]))
    return "\n\n".join(parts)


def _row(model: str, machine: str, rank: int | None, words: Words) -> str:
    number, _, device = machine.partition("x")
    _, best = answer_for(model, machine, ROWS * int(number), LENGTH, rank)
    start = f"| {number} x {device} | {words.full if rank is None else words.lora} "
    if best is None or best.step is None:
        return start + f"| {_what_is_enough(model, int(number), device, rank, words)} | | |"
    held, host = best.memory.reserved_bytes / 2**30, best.memory.host_bytes / 2**30
    holds = words.host.format(device=held, host=host) if host else f"{held:.1f} GiB"
    return start + f"| `{best.plan}` | {holds} | {best.step.total_s:.2f} s |"


def _what_is_enough(model: str, number: int, device: str, rank: int | None, words: Words) -> str:
    while number < MOST_DEVICES:
        number *= 2
        if answer_for(model, f"{number}x{device}", ROWS * number, LENGTH, rank)[1] is not None:
            return words.enough.format(devices=number)
    return words.too_large


def page_of(page: str, words: Words) -> str:
    """Returns a page with its tables anew.

    Raises:
        ValueError: The page has not each mark once.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}, each once")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables_of(words)}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Writes or checks the pages and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is another")
    options, status = parser.parse_args(), 0
    for language, words in LANGUAGES.items():
        file = PAGE.with_suffix(f"{language}.md")
        text = file.read_text(encoding="utf-8")
        wanted = page_of(text, words)
        if not options.check:
            file.write_text(wanted, encoding="utf-8")
        elif text != wanted:
            print(f"{file} is not what the planner says; run scripts/cookbook.py", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
