"""How good predictions for measured runs are: what fits, how much memory, how fast, and in which order.

Decides the definitions of the figures. Must not know how a prediction comes about.

[Note: definitions]
A run that succeeded or ran out of memory is judged by whether it was said to fit. Reserved memory is compared where it
succeeded. Speed is compared where it succeeded, for pipelines only after the sweep's program was repaired, and only at
a global batch of 256 rows; Spearman's coefficient and the first choices within groups of one model and one number of
devices with at least five runs. Tables of published runs, which have a `source`, are compared by tokens a second; rows
that name a model without stating its widths by themselves, since more is assumed for them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from moreh_ap.evaluation.run_table import is_true, run_of

__all__ = ["evaluate", "measured_step_s", "measured_tokens_per_s", "spearman"]

LEAST_GROUP = 5
"""Runs that a group needs for its order to be judged."""

JUDGED_BATCH = 256
"""Global batch at which speeds are compared."""

Row = Mapping[str, str]


def evaluate(rows: Sequence[Row]) -> dict[str, float]:
    """Returns every figure that rows with predictions allow, by name. See [Note: definitions]."""
    figures: dict[str, float] = {"rows": len(rows)}
    figures |= _feasibility(rows)
    figures |= _memory(rows)
    if rows and "source" in rows[0]:
        return figures | _published(rows)
    return figures | _speed(rows)


def _feasibility(rows: Sequence[Row]) -> dict[str, float]:
    judged = [row for row in rows if row.get("status") in ("Success", "OOM") and row.get("predicted_fits")]
    if not judged:
        return {}
    said = [(is_true(row["predicted_fits"]), row["status"] == "Success") for row in judged]
    right_fit, wrong_fit = said.count((True, True)), said.count((True, False))
    right_oom, wrong_oom = said.count((False, False)), said.count((False, True))
    return {
        "feasible_rows": len(judged),
        "tp": right_fit,
        "fp": wrong_fit,
        "tn": right_oom,
        "fn": wrong_oom,
        "accuracy": (right_fit + right_oom) / len(judged),
        "oom_among_called_fitting": wrong_fit / max(1, right_fit + wrong_fit),
        "fitting_thrown_away": wrong_oom / max(1, right_fit + wrong_oom),
    }


def _memory(rows: Sequence[Row]) -> dict[str, float]:
    errors = [
        abs(float(row["predicted_reserved_gib"]) / float(row["mem_reserved_gib"]) - 1.0)
        for row in rows
        if row.get("status") == "Success" and row.get("predicted_reserved_gib") and row.get("mem_reserved_gib")
    ]
    return {"reserved_median_abs_error": statistics.median(errors)} if errors else {}


def measured_step_s(row: Row) -> float | None:
    """Returns the measured seconds of a step of a run whose speed is judged, None for any other."""
    if row.get("status") != "Success" or not row.get("tokens_per_s_per_gpu"):
        return None
    if int(row.get("pp") or 1) > 1 and not is_true(row.get("after_pp_fix", "true")):
        return None
    if int(float(row.get("global_batch_sequences") or 0)) != JUDGED_BATCH:
        return None
    tokens = float(row["global_batch_sequences"]) * float(row["seq_len"])
    return tokens / float(row["tokens_per_s_per_gpu"]) / float(row["n_gpus"])


def _speed(rows: Sequence[Row]) -> dict[str, float]:
    groups: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        measured = measured_step_s(row)
        if measured is None:
            continue
        if row.get("predicted_step_time_s"):
            predicted = float(row["predicted_step_time_s"])
        elif row.get("predicted_tokens_per_s_per_gpu"):
            predicted = measured * float(row["tokens_per_s_per_gpu"]) / float(row["predicted_tokens_per_s_per_gpu"])
        else:
            continue
        groups[row.get("n_params_b") or row.get("model", ""), int(row["n_gpus"])].append((predicted, measured))
    errors = [abs(predicted / measured - 1.0) for group in groups.values() for predicted, measured in group]
    if not errors:
        return {}
    figures: dict[str, float] = {
        "time_rows": len(errors),
        "time_median_abs_error": statistics.median(errors),
        "time_mean_abs_error": statistics.fmean(errors),
    }
    large = [group for group in groups.values() if len(group) >= LEAST_GROUP]
    if large:
        bests = [min(measured for _, measured in group) for group in large]
        first = [sorted(group)[0][1] / best - 1.0 for group, best in zip(large, bests)]
        third = [min(measured for _, measured in sorted(group)[:3]) / best - 1.0 for group, best in zip(large, bests)]
        orders = [spearman([one for one, _ in group], [two for _, two in group]) for group in large]
        figures |= {
            "groups": len(large),
            "spearman_mean": statistics.fmean(orders),
            "top1_median": statistics.median(first),
            "top1_mean": statistics.fmean(first),
            "top3_median": statistics.median(third),
            "top3_mean": statistics.fmean(third),
        }
    return figures


def measured_tokens_per_s(row: Row) -> float | None:
    """Returns the published tokens a second and device, from the step time where the row states only that."""
    if row.get("tokens_per_s_per_gpu"):
        return float(row["tokens_per_s_per_gpu"])
    needed = ("step_time_s", "global_batch_sequences", "seq_len", "n_gpus")
    if any(not row.get(name) for name in needed):
        return None
    step_s, batch, length, devices = (float(row[name]) for name in needed)
    return batch * length / step_s / devices


def _published(rows: Sequence[Row]) -> dict[str, float]:
    errors: dict[str, list[float]] = {"published": [], "named": []}
    above = 0
    for row in rows:
        if not row.get("predicted_tokens_per_s_per_gpu"):
            continue
        predicted, measured = float(row["predicted_tokens_per_s_per_gpu"]), measured_tokens_per_s(row)
        run = run_of(row)
        needed_flops = predicted * run.profile.flops_per_row / run.profile.sequence_length
        above += needed_flops > run.cluster.device.peak_flops(run.system.matrix_precision or run.plan.precision)
        if measured:
            errors["published" if row.get("hidden") else "named"].append(abs(predicted / measured - 1.0))
    figures: dict[str, float] = {"above_peak": above}
    for kind, found in errors.items():
        if found:
            figures |= {
                f"{kind}_rows": len(found),
                f"{kind}_median_abs_error": statistics.median(found),
                f"{kind}_mean_abs_error": statistics.fmean(found),
            }
    return figures


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the correlation of the ranks of two series, equal values sharing theirs; 0.0 where one is constant."""
    one, two = _ranks(first), _ranks(second)
    mean_one, mean_two = statistics.fmean(one), statistics.fmean(two)
    together = sum((a - mean_one) * (b - mean_two) for a, b in zip(one, two))
    apart = (sum((a - mean_one) ** 2 for a in one) * sum((b - mean_two) ** 2 for b in two)) ** 0.5
    return together / apart if apart else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks, start = [0.0] * len(values), 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            ranks[order[place]] = (start + end) / 2
        start = end + 1
    return ranks
