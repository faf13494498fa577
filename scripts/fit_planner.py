"""Fits the few constants of the planner's step-time model to measured runs, and cross-validates them.

Needs nothing but this package. A search along one constant at a time, and along what a round changed,
lowers the mean absolute logarithm of predicted over measured step
time; fast plans count up to three times, since the planner has to tell them apart. Prints every constant, and with
`--cross-validate` the figures of every model size and every number of nodes predicted by constants that were fitted
without it. Nothing is written: constants are copied by hand into `moreh_ap/planner`, where each has its meaning.

    python scripts/fit_planner.py RUNS.csv [--rounds 20] [--cross-validate]
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moreh_ap.planner import evaluate, runs
from moreh_ap.planner.coefficients import COEFFICIENTS
from moreh_ap.planner.step_time import estimate_step

FITTED = (
    *(("coefficients", name) for name in (
        "half_tokens", "half_width", "memory", "step_s",
        "bucket_parameters",
    )),
    *(("practice", name) for name in (
        "host_s_per_kernel", "host_s_per_exchange", "hides_tensor", "hides_gradients", "hides_scatters",
    )),
    *(("NVLink4", name) for name in ("bytes_per_s",)),
    *(("EFA-32", name) for name in ("bytes_per_s", "latency_s", "queued_s", "queued_sum_s")),
    *(("EFA-32-crowded", name) for name in ("latency_s", "queued_s", "queued_sum_s", "crowding_s")),
)  # fmt: skip
"""Where each constant is, and its name."""

START = (
    250.0, 250.0, 0.8, 0.02, 25e6,
    1e-5, 1e-4, 0.3, 0.5, 0.5,
    360e9,
    250e9, 1e-4, 3e-5, 3e-5,
    1e-4, 3e-5, 3e-5, 1e-4,
)  # fmt: skip
"""Where the search begins, in the order of `FITTED`: data sheets, PyTorch's defaults and round guesses, so that a run
that is left out has no say in the result."""

MOST = {"hides_tensor": 1.0, "hides_gradients": 1.0, "hides_scatters": 1.0, "memory": 0.85}
"""Parts cannot be more than a whole."""


@dataclass(frozen=True)
class Sample:
    """A measured run: what the planner needs, what was measured, and how much it counts."""

    run: runs.Run
    measured_s: float
    weight: float
    row: dict[str, str]
    full: bool


def samples_of(rows: list[dict[str, str]]) -> list[Sample]:
    """Returns the runs whose speed the judge compares."""
    groups: dict[tuple[str, str], list[tuple[float, dict[str, str]]]] = defaultdict(list)
    for row in rows:
        measured_s = evaluate.measured_step_s(row)
        if measured_s is not None:
            groups[row["n_params_b"], row["n_gpus"]].append((measured_s, row))
    samples = []
    for group in groups.values():
        best = min(measured_s for measured_s, _ in group)
        for measured_s, row in group:
            run = runs.run_of(row)
            samples.append(Sample(run, measured_s, 1.0 + 2.0 * best / measured_s, row, runs.is_full(run)))
    return samples


def predict_s(sample: Sample, values: dict[tuple[str, str], float]) -> float:
    """Returns the predicted step time with these constants."""
    run, cluster = sample.run, sample.run.cluster

    def changed(place: str, thing: Any) -> Any:
        return replace(thing, **{name: value for (where, name), value in values.items() if where == place})

    late = cluster.inter.name == "EFA-32-crowded"
    inter = changed("EFA-32", cluster.inter)
    inter = changed("EFA-32-crowded", inter) if late else inter
    if not late:
        inter = replace(inter, crowding_s=cluster.inter.crowding_s)
    there = replace(cluster, inter=inter, intra=changed(cluster.intra.name, cluster.intra))
    practice = changed("practice", run.practice)
    coefficients = changed("coefficients", COEFFICIENTS)
    step_s = estimate_step(run.profile, run.plan, run.global_batch, there, practice, coefficients).total_s
    return step_s + (runs.RETRY_S * run.plan.micro_batches if sample.full else 0.0)


def loss(samples: Sequence[Sample], values: dict[tuple[str, str], float]) -> float:
    """Returns the weighted mean absolute logarithm of predicted over measured, no run counting as more than 1."""
    total = sum(s.weight * min(1.0, abs(math.log(predict_s(s, values) / s.measured_s))) for s in samples)
    return total / sum(s.weight for s in samples)


def fit(everything: Sequence[Sample], rounds: int, say: Callable[[str], None]) -> dict[tuple[str, str], float]:
    """Returns constants that no step up or down of any one of them improves much.

    Runs that spend their time in a full allocator say nothing of them and are left out.
    """
    samples = [sample for sample in everything if not sample.full]
    values, steps = dict(zip(FITTED, START)), dict.fromkeys(FITTED, 2.0)
    least = loss(samples, values)
    say(f"start {least:.4f}")
    for turn in range(rounds):
        if turn == rounds // 2:
            steps = dict.fromkeys(FITTED, 1.5)  # what looked settled may not be, now that the others have moved
        before = values
        for place in FITTED:
            for factor in (steps[place], 1.0 / steps[place]):
                tried = {**values, place: min(values[place] * factor, MOST.get(place[1], math.inf))}
                found = loss(samples, tried)
                if found < least:
                    values, least = tried, found
                    break
            else:
                steps[place] **= 0.5
        further = {place: min(values[place] ** 2 / before[place], MOST.get(place[1], math.inf)) for place in FITTED}
        found = loss(samples, further)
        if found < least:
            values, least = further, found
        say(f"round {turn + 1} {least:.4f}")
    return values


def main() -> None:
    """Fits, prints, and cross-validates where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", metavar="RUNS.csv")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cross-validate", action="store_true")
    arguments = parser.parse_args()
    with open(arguments.runs, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    samples = samples_of(rows)
    values = fit(samples, arguments.rounds, print)
    for (place, name), value in values.items():
        print(f"{place}.{name} = {value:.6g}")
    if not arguments.cross_validate:
        return
    for column in ("n_params_b", "n_gpus"):
        together = []
        for left_out in sorted({sample.row[column] for sample in samples}, key=float):
            others = [sample for sample in samples if sample.row[column] != left_out]
            values = fit(others, arguments.rounds, lambda text: None)
            for sample in samples:
                if sample.row[column] == left_out:
                    predicted = predict_s(sample, values)
                    together.append({**sample.row, "predicted_step_time_s": str(predicted)})
            errors = [
                abs(float(row["predicted_step_time_s"]) / float(evaluate.measured_step_s(row) or math.nan) - 1.0)
                for row in together
                if row[column] == left_out
            ]
            median = statistics.median(errors)
            print(f"without {column}={left_out}: {len(errors)} runs, median error {median:.3f}", flush=True)
        print(f"left out by {column}:", evaluate.evaluate(together))


if __name__ == "__main__":
    main()
