"""`moreh-ap predict`: memory and speed of the plans in a table of runs.

Decides how the table is read and written and what is said of rows that allow no prediction. Must not know how a
prediction comes about: that is `evaluation/predictions.py`.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from pathlib import Path

from moreh_ap.errors import MorehError, OptionError
from moreh_ap.evaluation import predictions

MOST_REASONS = 5
"""Reasons that are listed for rows without a prediction."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = __doc__.split("\n\n")[0]
    parser.epilog = "Columns that were measured in the runs are not looked at."
    parser.add_argument("runs", type=Path, metavar="RUNS.csv", help="runs, one plan a row")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT.csv", required=True, help="where to write")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, script_arguments: list[str]) -> int:
    """Writes the table with predictions and returns the exit status.

    Raises:
        OptionError: The table cannot be read or written, or has no row.
    """
    rows, columns = read_table(arguments.runs)
    reasons = predict_rows(rows)
    try:
        with arguments.output.open("w", newline="", encoding="utf-8") as file:
            added = [name for name in predictions.PREDICTED_COLUMNS if name not in columns]
            writer = csv.DictWriter(file, [*columns, *added])
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        fact = f"cannot write {arguments.output}: {error}"
        raise OptionError(fact, "a file that can be written", "moreh-ap predict runs.csv -o out.csv") from error
    without = sum(reasons.values())
    print(f"{len(rows) - without} of {len(rows)} rows predicted, written to {arguments.output}")
    for reason, count in reasons.most_common(MOST_REASONS):
        print(f"no prediction for {count} {'row' if count == 1 else 'rows'}: {reason}", file=sys.stderr)
    if len(reasons) > MOST_REASONS:
        others = without - sum(count for _, count in reasons.most_common(MOST_REASONS))
        print(f"no prediction for {others} {'row' if others == 1 else 'rows'}: other reasons", file=sys.stderr)
    return 0


def read_table(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Returns the rows of a table and its columns.

    Raises:
        OptionError: There is no such file, it is no table, or it has no row.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            rows = [{name: value for name, value in row.items() if isinstance(name, str)} for row in reader]
            columns = list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        fact = f"cannot read {path}: {error}"
        raise OptionError(fact, "a CSV file", "moreh-ap predict runs.csv -o out.csv") from error
    missing = [name for name in ("seq_len", "n_gpus", "gpu", "hidden", "n_layers") if name not in columns]
    if not rows or missing:
        fact = f"{path} has no row" if not rows else f"{path} has no column {', '.join(missing)}"
        raise OptionError(fact, "a CSV file with a header and one plan a row", "moreh-ap predict runs.csv -o out.csv")
    return rows, columns


def predict_rows(rows: list[dict[str, str]]) -> Counter[str]:
    """Adds the predicted columns to every row; returns for how many rows there is none, by reason."""
    reasons: Counter[str] = Counter()
    for row in rows:
        try:
            row.update(predictions.predict(row))
        except MorehError as error:
            reasons[error.fact] += 1
            row.update(dict.fromkeys(predictions.PREDICTED_COLUMNS, ""))
    return reasons
