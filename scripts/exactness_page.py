"""Writes docs/reference/exactness.md and moreh_ap/planner/proven.json from the results of the matrix.

    make test-matrix                     # runs the matrix, keeps its numbers in exactness.json, writes both
    python scripts/exactness_page.py     # writes both alone

`--check` writes nothing and exits with 1 if one of them is not what the results give. Decides how the page reads and
what the results prove. Must not know how a cell is computed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moreh_ap.plan import Plan
from moreh_ap.planner.proven import kinds_to_prove

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "reference" / "exactness.json", ROOT / "docs" / "reference" / "exactness.md"
PROVEN = ROOT / "moreh_ap" / "planner" / "proven.json"

Entry = dict[str, Any]

HEAD = """\
# Families and plans

<!-- Written by scripts/exactness_page.py from exactness.json. Change those. -->

Each cell trains one model twice: in one process without the one line, and with it under a plan, on workers that are CPU
processes. {num_cells} cells: {counts}.

The models are small (four blocks of width 64, four heads, a vocabulary of 101) and start from random weights; dropout
is off. Five steps with `clip_grad_norm_`, float32. A batch has nine rows, the last one seven, padded to different
lengths; one row has a single token. AdamW has an epsilon of 1e-6 ([why](../exactness.md#how-it-is-tested)); the user's
own transformer and the convolutional networks train with SGD.

| compared | relative to | limit |
|---|---|---|
| the loss of every step | the loss | 1e-5 |
| what `clip_grad_norm_` returns, every step | the norm | 1e-4 |
| every gradient of step 1, before and after clipping | the largest element of the tensor, but at least a thousandth \
of the model's largest | 1e-4 |
| every weight and buffer after five steps | the largest element of the tensor | 1e-4 |

In bfloat16 only the losses are compared, to 2 %.

How it was run: {how}. To run it again:

```sh
make test-matrix
python scripts/exactness_page.py
```
"""

LEGEND = """\
A number is the largest difference of its row and column. "refused": the plan ends with a `PlanError` that says why,
which is what the tests ask for. "whole": rows of this model look at each other, so every device computes the whole
batch; exact, and no faster than one device. **wrong** and **failed** are open. An empty cell has not run.
"""


def page_of(entries: list[Entry]) -> str:
    """The page as text."""
    parts = [HEAD.format(num_cells=len(entries), counts=_counts(entries), how=_how(entries)), LEGEND]
    parts.append(
        "## Plans\n\n| plan | as it is written | families | refused | largest loss difference | gradient | weight |"
    )
    parts[-1] += "\n|---|---|---|---|---|---|---|\n" + "\n".join(
        _plan_row(rows) for rows in _by(entries, "plan").values()
    )
    open_cells = [entry for entry in entries if entry["verdict"] not in ("exact", "refused")]
    if open_cells:
        rows = (f"| {e['family']} | `{e['text']}` | {e['verdict']} | {_in_a_table(e['note'])} |" for e in open_cells)
        parts.append("## Open\n\n| family | plan | verdict | what happens |\n|---|---|---|---|\n" + "\n".join(rows))
    refused = [entry for entry in entries if entry["verdict"] == "refused"]
    if refused:
        rows = (f"| {e['family']} | `{e['text']}` | {_in_a_table(e['note'])} |" for e in refused)
        parts.append("## Refused\n\n| family | plan | the error |\n|---|---|---|\n" + "\n".join(rows))
    for title, key in (("Losses", "loss"), ("Gradients", "gradient"), ("Weights", "weight")):
        parts.append(f"## {title}\n\n{_table(entries, lambda entry, key=key: _number(entry, key))}")
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _table(entries: list[Entry], show: Callable[[Entry], str]) -> str:
    """Rows are families, columns are plans."""
    plans = list(_by(entries, "plan"))
    lines = ["| family | " + " | ".join(plans) + " |", "|---" * (len(plans) + 1) + "|"]
    for family, row in _by(entries, "family").items():
        shown = {entry["plan"]: show(entry) for entry in row}
        lines.append(f"| {family} | " + " | ".join(shown.get(plan, "") for plan in plans) + " |")
    return "\n".join(lines)


def _number(entry: Entry, key: str) -> str:
    if entry["verdict"] == "refused" or key not in entry:
        return str(entry["verdict"]) if entry["verdict"] == "refused" else f"**{entry['verdict']}**"
    number = f"{entry[key]:.0e}" if entry[key] else "0"
    if entry["verdict"] != "exact":
        return f"**{entry['verdict']}** {number}"
    return f"{number} whole" if entry["note"] else number


def _plan_row(rows: list[Entry]) -> str:
    held = [entry for entry in rows if entry["verdict"] == "exact"]
    num_refused = sum(entry["verdict"] == "refused" for entry in rows)
    worst = [max((entry[key] for entry in held), default=0.0) for key in ("loss", "gradient", "weight")]
    numbers = " | ".join(f"{value:.0e}" if held else "" for value in worst)
    num_asked = len(rows) - num_refused
    return f"| {rows[0]['plan']} | `{rows[0]['text']}` | {len(held)} of {num_asked} | {num_refused or ''} | {numbers} |"


def _by(entries: list[Entry], key: str) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry[key], []).append(entry)
    return groups


def _counts(entries: list[Entry]) -> str:
    return ", ".join(f"{len(group)} {verdict}" for verdict, group in sorted(_by(entries, "verdict").items()))


def _how(entries: list[Entry]) -> str:
    versions = sorted({f"torch {e['torch']}, transformers {e['transformers']}, Python {e['python']}" for e in entries})
    dates = sorted({entry["date"] for entry in entries})
    minutes = sum(entry["seconds"] for entry in entries) / 60
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{'; '.join(versions)}; {days}; {minutes:.0f} minutes"


def _in_a_table(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def proven_of(entries: list[Entry]) -> str:
    """What the planner may choose without a trial, as the text of `proven.json`.

    A kind is proven for a family of a library if the matrix has cells of that kind for it and all of them are exact.
    """
    families: dict[str, list[str]] = {}
    for name, rows in sorted(_by(entries, "class").items()):
        verdicts: dict[str, set[str]] = {}
        for row in rows:
            for kind in kinds_to_prove(Plan.parse(row["text"])):
                verdicts.setdefault(kind, set()).add(row["verdict"])
        kinds = sorted(kind for kind, found in verdicts.items() if found == {"exact"})
        if kinds and name.startswith("transformers."):
            families[name] = kinds
    lines = [f"  {json.dumps(name)}: {json.dumps(kinds)}" for name, kinds in families.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--proven", type=Path, default=PROVEN)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    options = parser.parse_args()
    if not options.results.exists():
        print(f"{options.results} is not there; `make test-matrix` makes it", file=sys.stderr)
        return 1
    entries = json.loads(options.results.read_text())
    if not entries:
        print(f"{options.results} has no cells; `make test-matrix` makes them", file=sys.stderr)
        return 1
    out_of_date = 0
    for file, text in ((options.page, page_of(entries)), (options.proven, proven_of(entries))):
        if not options.check:
            file.write_text(text)
            print(file)
        elif not file.exists() or file.read_text() != text:
            print(f"{file} is not what {options.results} gives; run scripts/exactness_page.py", file=sys.stderr)
            out_of_date = 1
    return out_of_date


if __name__ == "__main__":
    sys.exit(main())
