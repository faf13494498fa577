"""Writes the generated part of docs/benchmarks{,.ko}.md: the figures that `make bench` has measured.

    python scripts/benchmarks_page.py            # writes it into the page of each language
    python scripts/benchmarks_page.py --check    # writes nothing; exits with 1 if a page is out of date

Decides how a figure reads, and marks it as stale where the code that it is about has changed since
(`bench_figures.py`). Everything on the page outside of the two marks is written by hand. Must not know how a figure is
measured.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench_figures import FIGURES, RESULTS, ROOT, digest

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: written by scripts/benchmarks_page.py -->", "<!-- end of figures -->"
COVERAGE = 0.95


class Words(NamedTuple):
    """The words of the generated part in one language."""

    head: str
    titles: dict[str, str]
    stale: str
    commands: str
    pairs: str
    span: str
    covered: str
    no_neighbours: str
    circumstances: str
    printed: str
    heads: dict[str, str]  # of printed tables, by what they are called there


ENGLISH = Words(
    "| figure | median | interval of the median | two equal runs | aim | measured |",
    {
        "ddp": "step time, against torchrun DDP",
        "startup": "start of the process to the end of the first step, against torchrun DDP",
        "fsdp": "step time, against torchrun FSDP2",
        "tensor": "step time, `tensor=2`, against `train_tp.py`",
        "pipeline": "step time, `pipeline=2`, against `train_pp.py`",
        "empty": "step of an empty model, loss read at every step, against torchrun DDP",
        "3d": "step time, `shard=2,tensor=2,pipeline=2`, against `train_3d.py`",
        "split": "a ResNet-18 whose batch is split",
        "small": "small models",
        "hosts": "step time on two hosts with one worker each, against torchrun on two nodes",
        "planner": "the planner's choice among all plans",
    },
    "**stale**: the code has changed since",
    "The commands, in `scripts`:",
    "pairs: {pairs}",
    "{low} to {high}",
    "{span} ({coverage:.0%})",
    "not measured",
    "{names}Measured on {machine}; {versions}; load {load} at the beginning. Losses differ by {losses} at most.",
    "### {title} { #figure-NAME }\n\n`{command}`, {measured}.",
    {},
)
KOREAN = Words(
    "| 수치 | 중앙값 | 중앙값의 구간 | 같은 두 실행 | 목표 | 측정 |",
    {
        "ddp": "스텝 시간, torchrun DDP와 비교",
        "startup": "프로세스 시작부터 첫 스텝의 끝까지, torchrun DDP와 비교",
        "fsdp": "스텝 시간, torchrun FSDP2와 비교",
        "tensor": "스텝 시간, `tensor=2`, `train_tp.py`와 비교",
        "pipeline": "스텝 시간, `pipeline=2`, `train_pp.py`와 비교",
        "empty": "빈 모델의 스텝, 매 스텝 손실을 읽음, torchrun DDP와 비교",
        "3d": "스텝 시간, `shard=2,tensor=2,pipeline=2`, `train_3d.py`와 비교",
        "split": "배치를 나누는 ResNet-18",
        "small": "작은 모델",
        "hosts": "워커가 하나씩인 두 호스트의 스텝 시간, 두 노드의 torchrun과 비교",
        "planner": "모든 플랜 가운데 플래너의 선택",
    },
    "**낡음**: 그 뒤에 코드가 바뀜",
    "`scripts`에 있는 명령은 다음과 같습니다.",
    "{pairs}쌍",
    "{low}~{high}",
    "{span} ({coverage:.0%})",
    "측정하지 않음",
    "{names}측정한 장비: {machine}. {versions}. 시작할 때의 부하 {load}. 손실의 차이는 최대 {losses}입니다.",
    "### {title} { #figure-NAME }\n\n`{command}`, {measured}.",
    {
        "script": "스크립트",
        "process, ms a step": "프로세스, 스텝당 ms",
        "line, ms a step": "한 줄, 스텝당 ms",
        "workers, ms a step": "워커, 스텝당 ms",
        "losses differ by": "손실의 차이",
    },
)
LANGUAGES = {"": ENGLISH, ".ko": KOREAN}
AIMS = {"startup": "x1.10", "empty": "+2.0 ms"}
"""Where it is not x1.00."""


def read_results(file: Path = RESULTS) -> dict[str, Any]:
    """Returns the figures in a file, by name."""
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return results


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns an interval of the median, and the probability with which it covers it; no distribution is assumed.

    The narrowest interval between two values that are equally far from the ends and that covers the median with 95 %,
    or from the least value to the largest where that is less (five values and fewer).

    Source:
        David and Nagaraja, Order Statistics (2003), section 7.1: of n values, the k-th from below and the k-th from
        above have the median between them with probability 1 - 2 P(Binomial(n, 1/2) < k).
    """
    ordered, num = sorted(values), len(values)

    def coverage(cut: int) -> float:
        return 1 - 2 * sum(math.comb(num, below) for below in range(cut + 1)) / 2**num

    cut = max((cut for cut in range((num + 1) // 2) if coverage(cut) >= COVERAGE), default=0)
    return ordered[cut], ordered[num - 1 - cut], max(coverage(cut), 0.0)


def compared(entry: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Returns what the pairs of a figure give, and what neighbours of the same script do: ratios, or differences."""
    runs = entry["runs"]

    def compare(first: Any, second: Any) -> float:
        one, other = (first[1], second[1]) if first[0] == "ours" else (second[1], first[1])
        return one - other if entry["mode"] == "empty" else one / other

    pairs = [compare(first, second) for first, second in zip(runs[::2], runs[1::2], strict=True)]
    neighbours = [compare(first, second) for first, second in zip(runs[1:-1:2], runs[2::2], strict=True)]
    return pairs, neighbours


def is_stale(name: str, entry: Mapping[str, Any]) -> bool:
    """Returns whether the code that a figure is about is another than when it was measured."""
    return bool(entry["digest"] != digest(FIGURES[name].paths))


def part_of(results: Mapping[str, Any], words: Words) -> str:
    """Returns the generated part of the page, between the marks."""
    rows = [words.head, "|---" * (words.head.count("|") - 1) + "|"]
    commands: dict[str, list[str]] = {}
    printed = []
    for name in FIGURES:
        if name not in results:
            continue
        entry = results[name]
        said = [entry["date"], f"`{entry['commit']}`" if entry["commit"] else "", is_stale(name, entry) and words.stale]
        measured = ", ".join(filter(None, said))
        if "printed" in entry:
            values = {"title": words.titles[name], "measured": measured, "command": entry["command"]}
            text = words.printed.replace("{ #figure-NAME }", f"{{{{ #figure-{name} }}}}").format(**values)
            shown = table_of(entry["printed"], words) or ["```text", *entry["printed"], "```"]
            printed.append("\n".join([text, "", *shown]))
        else:
            rows.append(_row(name, entry, words, measured))
            commands.setdefault(entry["command"], []).append(words.titles[name])
    listed = [f"- {'; '.join(titles)}: `{command}`" for command, titles in commands.items()]
    parts = ["\n".join(rows), *_circumstances(results, words), words.commands, "\n".join(listed), *printed]
    return "\n\n".join(parts)


def table_of(lines: Sequence[str], words: Words = ENGLISH) -> list[str]:
    """Returns a table of box characters as a Markdown table; nothing where lines are something else."""
    if not lines or any(line[:1] not in set("┏┃┡│└") for line in lines):
        return []
    rows = [[cell.strip() for cell in line[1:-1].split(line[0])] for line in lines if line[0] in "┃│"]
    rows[0] = [words.heads.get(cell, cell) for cell in rows[0]]
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    rest = [re.sub(r"([\d.]+) to ([\d.]+)", words.span.format(low=r"\1", high=r"\2"), row) for row in rest]
    return [head, "|---" * len(rows[0]) + "|", *rest]


def _circumstances(results: Mapping[str, Any], words: Words) -> list[str]:
    """Returns a sentence for each machine with its versions; it names its figures where there are several machines."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name in FIGURES:
        if "machine" in results.get(name, ()):
            alike.setdefault((results[name]["machine"], results[name]["versions"]), []).append(name)
    said = []
    for (machine, versions), names in alike.items():
        loads = sorted({results[name]["load"] for name in names})
        load = words.span.format(low=loads[0], high=loads[-1]) if len(loads) > 1 else loads[0]
        losses = max(results[name].get("losses_differ_by", 0.0) for name in names)
        titles = "; ".join(words.titles[name] for name in names) + ": " if len(alike) > 1 else ""
        values = {"names": titles, "machine": machine, "versions": versions, "load": load}
        said.append(words.circumstances.format(**values, losses=f"{losses:.0e}" if losses else "0"))
    return said


def _row(name: str, entry: Mapping[str, Any], words: Words, measured: str) -> str:
    shown = "{:+.1f} ms".format if entry["mode"] == "empty" else "x{:.2f}".format
    equal = words.no_neighbours
    if "runs" in entry:
        pairs, neighbours = compared(entry)
        median, num_pairs = statistics.median(pairs), len(pairs)
        low, high, coverage = interval(pairs)
        if neighbours:
            equal = words.span.format(low=shown(min(neighbours)), high=shown(max(neighbours)))
    else:
        median, num_pairs, low, high = (entry[key] for key in ("median", "pairs", "low", "high"))
        coverage = interval([0.0] * num_pairs)[2]
    span = words.covered.format(span=words.span.format(low=shown(low), high=shown(high)), coverage=coverage)
    cells = [words.titles[name], f"{shown(median)}, {words.pairs.format(pairs=num_pairs)}"]
    return f"| {' | '.join([*cells, span, equal, AIMS.get(name, 'x1.00'), measured])} |"


def page_of(page: str, results: Mapping[str, Any], words: Words) -> str:
    """Returns a page with its generated part anew.

    Raises:
        ValueError: The page has not each mark once.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}, each once")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{part_of(results, words)}\n\n{END}{rest.partition(END)[2]}"


def write_pages(results: Mapping[str, Any], page: Path = PAGE) -> None:
    """Writes the generated part into the page of each language."""
    for language, words in LANGUAGES.items():
        file = page.with_suffix(f"{language}.md")
        file.write_text(page_of(file.read_text(encoding="utf-8"), results, words), encoding="utf-8")


def main() -> int:
    """Runs the command line; returns 1 with `--check` where a page is out of date, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE, help="the English one; the others lie beside it")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    options = parser.parse_args()
    results = read_results(options.results)
    if not options.check:
        write_pages(results, options.page)
        return 0
    out_of_date = 0
    for language, words in LANGUAGES.items():
        file = options.page.with_suffix(f"{language}.md")
        text = file.read_text(encoding="utf-8")
        if text != page_of(text, results, words):
            print(f"{file} is not what {options.results} and the code give; run scripts/benchmarks_page.py",
                  file=sys.stderr)  # fmt: skip
            out_of_date = 1
    return out_of_date


if __name__ == "__main__":
    sys.exit(main())
