"""Fits the constants of the planner's step time and memory to measured runs, and cross-validates them.

Needs nothing but this package. A search along one constant at a time, and along what a round changed, lowers the loss
of each subject in `fit_subjects.py`. Prints every constant, and with `--cross-validate` the figures of every model size
and every number of devices predicted by constants that were fitted without it. Nothing is written: constants are copied
by hand into `moreh_ap/planner`, where each has its meaning.

    python scripts/fit_planner.py RUNS.csv [--subject memory] [--rounds 20] [--cross-validate] [--jobs 2]
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from fit_subjects import SUBJECTS, Memory, Place, Sample, StepTime

from moreh_ap.evaluation import accuracy

LEFT_OUT = ("n_params_b", "n_gpus")
"""Columns each of whose values is left out once."""

Subject = StepTime | Memory


def fit(subject: Subject, samples: Sequence[Sample], rounds: int, say: Callable[[str], None]) -> dict[Place, float]:
    """Returns constants that no step up or down of any one of them improves much."""
    values = dict(subject.start)
    steps = dict.fromkeys(values, 2.0)
    least = subject.loss(samples, values)
    say(f"start {least:.4f}")

    def at_most(place: Place, value: float) -> float:
        return min(value, subject.most.get(place[1], math.inf))

    for turn in range(rounds):
        if turn == rounds // 2:
            steps = dict.fromkeys(values, 1.5)  # what looked settled may not be, now that the others have moved
        before = values
        for place in subject.start:
            for factor in (steps[place], 1.0 / steps[place]):
                tried = {**values, place: at_most(place, values[place] * factor)}
                found = subject.loss(samples, tried)
                if found < least:
                    values, least = tried, found
                    break
            else:
                steps[place] **= 0.5
        further = {place: at_most(place, values[place] ** 2 / before[place]) for place in values}
        found = subject.loss(samples, further)
        if found < least:
            values, least = further, found
        say(f"round {turn + 1} {least:.4f}")
    return values


def predict_left_out(
    subject_name: str, table: list[dict[str, str]], column: str, value: str, rounds: int
) -> list[dict[str, str]]:
    """Returns the rows with this value, predicted by constants that were fitted without them."""
    subject = next(one for one in SUBJECTS if one.name == subject_name)
    samples = subject.samples(table)
    values = fit(subject, [one for one in samples if one.row[column] != value], rounds, lambda text: None)
    return [{**one.row, **subject.predicted(one, values)} for one in samples if one.row[column] == value]


def cross_validate(subject: Subject, table: list[dict[str, str]], rounds: int, jobs: int) -> None:
    """Prints the figures of every value of every column, left out, and of all values of a column together."""
    with ProcessPoolExecutor(jobs) as pool:
        for column in LEFT_OUT:
            left_out = sorted({sample.row[column] for sample in subject.samples(table)}, key=float)
            asked = [pool.submit(predict_left_out, subject.name, table, column, one, rounds) for one in left_out]
            together = []
            for value, answer in zip(left_out, asked):
                predicted = answer.result()
                together += predicted
                print(f"without {column}={value}: {_figures(predicted)}", flush=True)
            print(f"left out by {column}: {_figures(together)}", flush=True)


def _figures(table: list[dict[str, str]]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in accuracy.evaluate(table).items()}


def main() -> None:
    """Fits, prints, and cross-validates where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", metavar="RUNS.csv")
    parser.add_argument("--subject", choices=[one.name for one in SUBJECTS], help="default: all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cross-validate", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="processes of the cross-validation")
    arguments = parser.parse_args()
    with open(arguments.runs, newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    for subject in SUBJECTS:
        if arguments.subject not in (None, subject.name):
            continue
        print(subject.name)
        samples = subject.samples(table)
        values = fit(subject, samples, arguments.rounds, lambda text: print(text, flush=True))
        for (place, name), value in values.items():
            print(f"{place}.{name} = {value:.6g}")
        whole = [{**one.row, **subject.predicted(one, values)} for one in samples]
        print(f"whole table: {_figures(whole)}", flush=True)
        if arguments.cross_validate:
            cross_validate(subject, table, arguments.rounds, arguments.jobs)


if __name__ == "__main__":
    main()
