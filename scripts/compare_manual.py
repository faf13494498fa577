#!/usr/bin/env python
"""Writes docs/manual-or-one-line.md and its .ko.md: the scripts of `tutorials/manual` beside the one line.

    python scripts/compare_manual.py                     # the pages, from the scripts and docs/reference/manual.json
    python scripts/compare_manual.py --check             # writes nothing; exits with 1 if a page is another
    python scripts/compare_manual.py --measure           # runs all of them, renews the JSON, then writes the pages
    python scripts/compare_manual.py --measure ddp tp    # renews these

Decides what stands on a page; `manual_words.py` and `manual_words_ko.py` have its words. Must not know how a script is
read (`manual_sources.py`) or measured (`manual_runs.py`). Lines, differences and concepts come from the files, losses
from the JSON, step times from the figures of `docs/benchmarks.md` (`step_ratios.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path

from manual_counterparts import COUNTERPARTS, ONE_LINE, ONE_LINE_COMMAND, SINGLE, SINGLE_COMMAND, Counterpart
from manual_runs import Entry, largest_difference, machine_of, measure, run_alone
from manual_sources import borrowed, changed_lines, code_of, concepts_of, difference
from manual_words import ENGLISH, Words
from manual_words_ko import KOREAN
from step_ratios import step_ratio_of

ROOT = Path(__file__).resolve().parents[1]
PAGE, MEASURED = ROOT / "docs" / "manual-or-one-line.md", ROOT / "docs" / "reference" / "manual.json"

LANGUAGES = {"": ENGLISH, ".ko": KOREAN}
"""What stands before `.md` in the name of the page: its words."""


def page_of(entries: dict[str, Entry], words: Words) -> str:
    """Returns the page as text.

    Args:
        entries: What was measured, by name of the counterpart.
        words: The language.
    """
    counts = {counterpart: lines_of(counterpart) for counterpart in COUNTERPARTS}
    rows = (_row(counterpart, entries[counterpart.name], words) for counterpart in COUNTERPARTS)
    added, removed = changed_lines(_text(SINGLE), _text(ONE_LINE))
    num_concepts = len(concepts_of(ROOT / ONE_LINE))
    one_line = f"| `{Path(ONE_LINE).name}` | **+{added} -{removed}** | {num_concepts} | | |"
    head = words.page["head"].format(
        chart=words.page["chart"],
        lines=added,
        concepts=max(len(concepts_of(ROOT / counterpart.path)) for counterpart in COUNTERPARTS),
        fewest=min(counts.values())[0],
        most=max(counts.values())[0],
        single=SINGLE,
        single_name=Path(SINGLE).name,
        rows="\n".join((one_line, *rows)),
        how=_how(entries, words),
    )
    sections = (_section(counterpart, words) for counterpart in COUNTERPARTS)
    return "\n".join((head, _one_line_section(words), *sections))


def _row(counterpart: Counterpart, entry: Entry, words: Words) -> str:
    added, removed = lines_of(counterpart)
    largest, ratio = largest_difference(entry), step_ratio_of(counterpart.name, entry)
    speed = words.page["speed"].format(**ratio._asdict()) if ratio else words.page["unknown"]
    link = f"[`{Path(counterpart.path).name}`](#by-hand-{counterpart.name})"
    num_concepts = len(concepts_of(ROOT / counterpart.path))
    return f"| {link} | +{added} -{removed} | {num_concepts} | {largest:.0e} | {speed} |"


def lines_of(counterpart: Counterpart) -> tuple[int, int]:
    """Returns the lines of code that a script by hand adds to the one for one device, and those that it removes."""
    added, removed = changed_lines(_text(SINGLE), _text(counterpart.path))
    return added + num_borrowed(counterpart) + sum(len(_text(file).splitlines()) for file in counterpart.files), removed


def num_borrowed(counterpart: Counterpart) -> int:
    """Returns the lines of code that a script imports from those beside it."""
    return sum(len(code_of(text)) for texts in borrowed(ROOT / counterpart.path).values() for text in texts)


def _how(entries: dict[str, Entry], words: Words) -> str:
    """Returns how the figures were measured, once for each way in which they were."""
    ways: dict[str, list[str]] = {}
    for name, entry in entries.items():
        machine = words.page["machine"].format(**machine_of(entry))
        way = f"{entry['date']}; {machine}; {entry['versions']}; `{entry['flags']}`."
        ways.setdefault(way, []).append(name)
    return "\n".join(f"    - {', '.join(names)}: {way}" for way, names in ways.items())


def _one_line_section(words: Words) -> str:
    commands = _block("sh", f"{SINGLE_COMMAND}\n{ONE_LINE_COMMAND}").strip()
    changes = _block("diff", difference(_text(SINGLE), _text(ONE_LINE)))
    return f"{words.page['one_line'].format(commands=commands)}\n{changes}\n"


def _section(counterpart: Counterpart, words: Words) -> str:
    page, about = words.page, words.scripts[counterpart.name]
    concepts = "\n".join(f"- {words.concepts[concept]}" for concept in concepts_of(ROOT / counterpart.path))
    wrong = "\n".join(f"- {text}" for text in about.goes_wrong)
    starts = []
    for lines in counterpart.commands:
        block = _block("sh", "\n".join(dict.fromkeys(lines)))
        at_once = f"{page['places'].format(num_places=len(lines))}\n\n"
        starts.append(f"{at_once if len(lines) > 1 else ''}{block}")
    plan = page["plan"].format(shared=about.shared, plan=counterpart.plan)
    parts = [f"## {about.title} {{ #by-hand-{counterpart.name} }}", plan, *starts, about.note]
    parts.append(f"{page['know']}\n\n{concepts}")
    parts.append(f"{page['wrong']}\n\n{wrong}")
    if num_lines := num_borrowed(counterpart):
        files = page["and"].join(f"`{file.name}`" for file in borrowed(ROOT / counterpart.path))
        parts.append(page["borrowed"].format(num_lines=num_lines, files=files))
    for title, path in ((page["by_hand"], counterpart.path), (page["with_line"], ONE_LINE)):
        block = _block("diff", difference(_text(SINGLE), _text(path)))
        parts.append(f'=== "{title}"\n\n{textwrap.indent(block, "    ")}')
    for file in counterpart.files:
        parts.append(f"{page['file'].format(name=Path(file).name)}\n\n{_block('json', _text(file))}")
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def main() -> int:
    """Writes or checks the pages and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [counterpart.name for counterpart in COUNTERPARTS]
    parser.add_argument("--measure", nargs="*", metavar="NAME", help=f"run these first (default: {', '.join(names)})")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs for each")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is another")
    args = parser.parse_args()
    if unknown := sorted(set(args.measure or ()) - set(names)):
        parser.error(f"--measure {' '.join(unknown)}: there are {', '.join(names)}")
    entries = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    if args.measure is not None:
        alone = run_alone()
        for counterpart in COUNTERPARTS:
            if not args.measure or counterpart.name in args.measure:
                entries[counterpart.name] = measure(counterpart, alone, args.pairs)
                ordered = {name: entries[name] for name in names if name in entries}
                MEASURED.write_text(json.dumps(ordered, indent=1) + "\n")
    if missing := [name for name in names if name not in entries]:
        print(f"{MEASURED} has no {', '.join(missing)}; --measure {' '.join(missing)} makes them", file=sys.stderr)
        return 1
    status = 0
    for language, words in LANGUAGES.items():
        file, page = PAGE.with_suffix(f"{language}.md"), page_of(entries, words)
        if not args.check:
            file.write_text(page, encoding="utf-8")
            print(file)
        elif not file.is_file() or file.read_text(encoding="utf-8") != page:
            print(f"{file} is not what the scripts give; run this without --check", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
