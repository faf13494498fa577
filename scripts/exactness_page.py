"""Writes docs/reference/exactness{,.ko}.md and planner/search/verified_kinds.json from the results of the matrix.

    make test-matrix                     # runs the matrix, keeps its numbers in exactness.json, writes all three
    python scripts/exactness_page.py     # writes the three alone

`--check` writes nothing and exits with 1 if one of them is not what the results give. Decides what stands on the page
and what the results show; `exactness_words.py` has its words. Must not know how a cell is computed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from exactness_words import LANGUAGES, Words

from moreh_ap.plan import Plan
from moreh_ap.planner.search.verified_kinds import kinds_to_verify

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "reference" / "exactness.json", ROOT / "docs" / "reference" / "exactness.md"
VERIFIED_KINDS = ROOT / "moreh_ap" / "planner" / "search" / "verified_kinds.json"

Entry = dict[str, Any]


def page_of(entries: list[Entry], words: Words) -> str:
    """Returns the page as text."""
    how = {"num_cells": len(entries), "counts": _counts(entries, words), "how": _how(entries, words)}
    parts = [words["head"].format(**how), words["legend"]]
    parts.append(_table(words["plans"], [_plan_row(rows, words) for rows in _by(entries, "plan").values()]))
    open_cells = [entry for entry in entries if entry["verdict"] not in ("exact", "refused")]
    if open_cells:
        rows = [[*_cell(e), words[e["verdict"]], _in_a_table(e["note"])] for e in open_cells]
        parts.append(_table(words["open"], rows))
    refused = [entry for entry in entries if entry["verdict"] == "refused"]
    if refused:
        parts.append(_table(words["refusals"], [[*_cell(entry), _in_a_table(entry["note"])] for entry in refused]))
    parts.extend(_differences(entries, key, words) for key in ("loss", "gradient", "weight"))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _table(head: str, rows: list[list[str]]) -> str:
    """Returns a table under its head, the last line of which has the names of the columns."""
    num_columns = head.splitlines()[-1].count("|") - 1
    return "\n".join([head, "|---" * num_columns + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def _differences(entries: list[Entry], key: str, words: Words) -> str:
    """Returns the table of one kind of difference: rows are families, columns are plans."""
    plans, rows = list(_by(entries, "plan")), []
    for family, row in _by(entries, "family").items():
        shown = {entry["plan"]: _number(entry, key, words) for entry in row}
        rows.append([family, *(shown.get(plan, "") for plan in plans)])
    return _table(f"{words[key]} {' | '.join(plans)} |", rows)


def _number(entry: Entry, key: str, words: Words) -> str:
    verdict = words[entry["verdict"]]
    if entry["verdict"] == "refused" or key not in entry:
        return verdict if entry["verdict"] == "refused" else f"**{verdict}**"
    number = f"{entry[key]:.0e}" if entry[key] else "0"
    if entry["verdict"] != "exact":
        return f"**{verdict}** {number}"
    return f"{number} {words['whole']}" if entry["note"] else number


def _plan_row(rows: list[Entry], words: Words) -> list[str]:
    held = [entry for entry in rows if entry["verdict"] == "exact"]
    num_refused = sum(entry["verdict"] == "refused" for entry in rows)
    worst = [max((entry[key] for entry in held), default=0.0) for key in ("loss", "gradient", "weight")]
    numbers = [f"{value:.0e}" if held else "" for value in worst]
    share = words["held"].format(held=len(held), asked=len(rows) - num_refused)
    return [rows[0]["plan"], f"`{rows[0]['text']}`", share, str(num_refused or ""), *numbers]


def _cell(entry: Entry) -> tuple[str, str]:
    return entry["family"], f"`{entry['text']}`"


def _by(entries: list[Entry], key: str) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry[key], []).append(entry)
    return groups


def _counts(entries: list[Entry], words: Words) -> str:
    groups = sorted(_by(entries, "verdict").items())
    return ", ".join(words["count"].format(number=len(group), verdict=words[verdict]) for verdict, group in groups)


def _how(entries: list[Entry], words: Words) -> str:
    versions = sorted({f"torch {e['torch']}, transformers {e['transformers']}, Python {e['python']}" for e in entries})
    dates = sorted({entry["date"] for entry in entries})
    minutes = words["minutes"].format(minutes=sum(entry["seconds"] for entry in entries) / 60)
    days = dates[0] if len(dates) == 1 else words["days"].format(first=dates[0], last=dates[-1])
    return f"{'; '.join(versions)}; {days}; {minutes}"


def _in_a_table(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def verified_kinds_of(entries: list[Entry]) -> str:
    """What the planner may choose without a trial, as the text of `verified_kinds.json`.

    A kind is verified for a family of a library if the matrix has cells of that kind for it and all of them are exact.
    """
    families: dict[str, list[str]] = {}
    for name, rows in sorted(_by(entries, "class").items()):
        verdicts: dict[str, set[str]] = {}
        for row in rows:
            for kind in kinds_to_verify(Plan.parse(row["text"])):
                verdicts.setdefault(kind, set()).add(row["verdict"])
        kinds = sorted(kind for kind, found in verdicts.items() if found == {"exact"})
        if kinds and name.startswith("transformers."):
            families[name] = kinds
    lines = [f"  {json.dumps(name)}: {json.dumps(kinds)}" for name, kinds in families.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE, help="the English one; the others lie beside it")
    parser.add_argument("--verified-kinds", type=Path, default=VERIFIED_KINDS)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    options = parser.parse_args()
    if not options.results.exists():
        print(f"{options.results} is not there; `make test-matrix` makes it", file=sys.stderr)
        return 1
    entries = json.loads(options.results.read_text(encoding="utf-8"))
    if not entries:
        print(f"{options.results} has no cells; `make test-matrix` makes them", file=sys.stderr)
        return 1
    texts = {options.page.with_suffix(f"{name}.md"): page_of(entries, words) for name, words in LANGUAGES.items()}
    out_of_date = 0
    for file, text in {**texts, options.verified_kinds: verified_kinds_of(entries)}.items():
        if not options.check:
            file.write_text(text, encoding="utf-8")
            print(file)
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            print(f"{file} is not what {options.results} gives; run scripts/exactness_page.py", file=sys.stderr)
            out_of_date = 1
    return out_of_date


if __name__ == "__main__":
    sys.exit(main())
