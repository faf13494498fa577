"""What `fit_planner.py` can fit: the step time of runs, and their memory.

Decides which constants are fitted and where each begins, how a run is predicted with given constants, and what counts
as a miss. Must not know how constants are searched or what is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moreh_ap.evaluation import accuracy, predictions, run_table
from moreh_ap.planner.cost.coefficients import COEFFICIENTS
from moreh_ap.planner.cost.memory_footprint import estimate_memory
from moreh_ap.planner.cost.step_time import estimate_step

Place = tuple[str, str]
Values = Mapping[Place, float]


@dataclass(frozen=True)
class Sample:
    """A measured run: its row, what the planner makes of it, what was measured, and how much it counts."""

    row: dict[str, str]
    run: run_table.Run
    measured: float
    weight: float = 1.0
    full: bool = False


class StepTime:
    """Seconds of a step. Fast plans count up to three times, since the planner has to tell them apart.

    Runs that spend their time in a full allocator say nothing of the constants, and are predicted with them only.
    """

    name = "step time"
    start: Mapping[Place, float] = {
        ("coefficients", "half_tokens"): 250.0,
        ("coefficients", "half_width"): 250.0,
        ("coefficients", "memory"): 0.8,
        ("coefficients", "step_s"): 0.02,
        ("coefficients", "bucket_parameters"): 25e6,
        ("system", "host_s_per_kernel"): 1e-5,
        ("system", "host_s_per_exchange"): 1e-4,
        ("system", "hides_tensor"): 0.3,
        ("system", "hides_gradients"): 0.5,
        ("system", "hides_scatters"): 0.5,
        ("NVLink4", "bytes_per_s"): 360e9,
        ("EFA-32", "bytes_per_s"): 250e9,
        ("EFA-32", "latency_s"): 1e-4,
        ("EFA-32", "queued_s"): 3e-5,
        ("EFA-32", "queued_sum_s"): 3e-5,
        ("EFA-32-crowded", "latency_s"): 1e-4,
        ("EFA-32-crowded", "queued_s"): 3e-5,
        ("EFA-32-crowded", "queued_sum_s"): 3e-5,
        ("EFA-32-crowded", "crowding_s"): 1e-4,
    }
    """Data sheets, PyTorch's defaults and round guesses, so that a run that is left out has no say in the result."""
    most: Mapping[str, float] = {"hides_tensor": 1.0, "hides_gradients": 1.0, "hides_scatters": 1.0, "memory": 0.85}
    """Parts cannot be more than a whole."""

    def samples(self, table: Sequence[dict[str, str]]) -> list[Sample]:
        """Returns the runs whose speed is judged."""
        groups: dict[tuple[str, str], list[tuple[float, dict[str, str]]]] = defaultdict(list)
        for row in table:
            measured_s = accuracy.measured_step_s(row)
            if measured_s is not None:
                groups[row["n_params_b"], row["n_gpus"]].append((measured_s, row))
        samples = []
        for group in groups.values():
            best = min(measured_s for measured_s, _ in group)
            for measured_s, row in group:
                run = run_table.run_of(row)
                samples.append(Sample(row, run, measured_s, 1.0 + 2.0 * best / measured_s, predictions.is_full(run)))
        return samples

    def loss(self, samples: Sequence[Sample], values: Values) -> float:
        """Returns the weighted mean absolute logarithm of predicted over measured, no run counting as more than 1."""
        told = [sample for sample in samples if not sample.full]
        total = sum(s.weight * min(1.0, abs(math.log(self._step_s(s, values) / s.measured))) for s in told)
        return total / sum(s.weight for s in told)

    def predicted(self, sample: Sample, values: Values) -> dict[str, str]:
        """Returns the columns that these constants predict."""
        return {"predicted_step_time_s": str(self._step_s(sample, values))}

    def _step_s(self, sample: Sample, values: Values) -> float:
        run, cluster = sample.run, sample.run.cluster
        late = cluster.inter.name == "EFA-32-crowded"
        inter = _changed("EFA-32", cluster.inter, values)
        if late:
            inter = _changed("EFA-32-crowded", inter, values)
        there = replace(cluster, inter=inter, intra=_changed(cluster.intra.name, cluster.intra, values))
        system = _changed("system", run.system, values)
        coefficients = _changed("coefficients", COEFFICIENTS, values)
        step_s = estimate_step(run.profile, run.plan, run.global_batch, there, system, coefficients).total_s
        return step_s + (predictions.RETRY_S * run.plan.micro_batches if sample.full else 0.0)


class Memory:
    """Bytes that are reserved, and whether a run fits.

    Every run that succeeded or ran out of memory counts: by the side on which it is, by how far it is on the wrong
    side, and where its reserved memory was measured by that. `limit.usable` is the part of a device that can be
    reserved.
    """

    name = "memory"
    start: Mapping[Place, float] = {
        ("coefficients", "fragmentation"): 0.1,
        ("coefficients", "reserved_bytes"): 1e9,
        ("system", "bucket_bytes"): 2.0,
        ("system", "logits_kept_bytes"): 4.0,
        ("before, pipeline", "logits_peak_bytes"): 4.0,
        ("before, no pipeline", "logits_peak_bytes"): 4.0,
        ("before, no pipeline", "logits_left_bytes"): 2.0,
        ("before, no pipeline", "gathered_kept"): 2.0,
        ("after", "logits_peak_bytes"): 4.0,
        ("after", "logits_left_bytes"): 2.0,
        ("after", "boundary_kept"): 4.0,
        ("limit", "usable"): 0.95,
    }
    """2 bytes for what is in 16 bits, 4 for what is in float32; a tenth, a gigabyte and a twentieth for the rest."""
    most: Mapping[str, float] = {"usable": 1.0}

    def samples(self, table: Sequence[dict[str, str]]) -> list[Sample]:
        """Returns the runs that succeeded or ran out of memory; nan where reserved memory was not measured."""
        return [
            Sample(row, run_table.run_of(row), float(row["mem_reserved_gib"] or math.nan) * 2**30)
            for row in table
            if row["status"] in ("Success", "OOM")
        ]

    def loss(self, samples: Sequence[Sample], values: Values) -> float:
        """Returns the part of runs on the wrong side, how far they are there, and the mean error of reserved bytes."""
        wrong, errors = 0.0, []
        for sample in samples:
            logged, fullest = self._reserved_bytes(sample, values)
            over = math.log(fullest / (sample.run.cluster.device.memory_bytes * values["limit", "usable"]))
            fitted = sample.row["status"] == "Success"
            if (over <= 0.0) != fitted:
                wrong += 1.0 + min(1.0, abs(over))
            if fitted and sample.measured == sample.measured:
                errors.append(min(1.0, abs(math.log(logged / sample.measured))))
        return wrong / len(samples) + (sum(errors) / len(errors) if errors else 0.0)

    def predicted(self, sample: Sample, values: Values) -> dict[str, str]:
        """Returns the columns that these constants predict."""
        logged, fullest = self._reserved_bytes(sample, values)
        fits = fullest <= sample.run.cluster.device.memory_bytes * values["limit", "usable"]
        return {"predicted_reserved_gib": str(logged / 2**30), "predicted_fits": str(fits)}

    def _reserved_bytes(self, sample: Sample, values: Values) -> tuple[float, float]:
        """Returns what the first position reserves, of which the runs tell, and what the fullest does."""
        run = sample.run
        period = "after"
        if not run_table.is_true(sample.row["after_pp_fix"]):
            period = "before, pipeline" if run.plan.pipeline > 1 else "before, no pipeline"
        system = _changed(period, _changed("system", run.system, values), values)
        coefficients = _changed("coefficients", COEFFICIENTS, values)
        asked = (run.profile, run.plan, run.global_batch, system, coefficients)
        fullest = estimate_memory(*asked).reserved_bytes
        if run.plan.pipeline == 1:
            return fullest, fullest
        return estimate_memory(*asked, position=0).reserved_bytes, fullest


SUBJECTS = (StepTime(), Memory())
"""What can be fitted."""


def _changed(place: str, thing: Any, values: Values) -> Any:
    """Returns a thing with the values that are for this place."""
    return replace(thing, **{name: value for (where, name), value in values.items() if where == place})
