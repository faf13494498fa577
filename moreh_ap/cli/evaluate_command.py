"""`moreh-ap evaluate`: how far predictions are from the runs that were measured.

Decides how the figures are shown. Must not know what they mean: that is `evaluation/accuracy.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from moreh_ap.cli import predict_command
from moreh_ap.evaluation import accuracy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = __doc__.split("\n\n")[0]
    parser.epilog = "Rows are predicted anew, also where the table has predictions."
    parser.add_argument("runs", type=Path, metavar="RUNS.csv", help="measured runs, one a row")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, script_arguments: list[str]) -> int:
    """Predicts every row, prints the figures and returns the exit status.

    Raises:
        OptionError: The table cannot be read or has no row.
    """
    rows, _ = predict_command.read_table(arguments.runs)
    reasons = predict_command.predict_rows(rows)
    figures = accuracy.evaluate(rows)
    for reason, count in reasons.most_common(predict_command.MOST_REASONS):
        print(f"no prediction for {count} {'row' if count == 1 else 'rows'}: {reason}", file=sys.stderr)
    if set(figures) == {"rows"}:
        print("no measured value to compare; docs/planner.md has the columns that are read", file=sys.stderr)
    if arguments.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
        return 0
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:{width}}  {value:g}" if float(value).is_integer() else f"{name:{width}}  {value:.4f}")
    return 0
