"""Predictions for rows: what was measured is not looked at, and what makes a run faster or smaller."""

from __future__ import annotations

from moreh_ap.evaluation import predictions, run_table
from unit.evaluation.samples import PUBLISHED, SWEPT


def test_what_was_measured_is_not_looked_at():
    otherwise = SWEPT | dict.fromkeys(run_table.MEASURED_COLUMNS, "nonsense")
    without = {name: value for name, value in SWEPT.items() if name not in run_table.MEASURED_COLUMNS}
    assert predictions.predict(SWEPT) == predictions.predict(otherwise) == predictions.predict(without)


def test_eight_bits_are_faster_than_sixteen_but_not_twice():
    sixteen, eight = (
        float(predictions.predict(PUBLISHED | {"precision": precision})["predicted_tokens_per_s_per_gpu"])
        for precision in ("bf16", "fp8")
    )
    assert sixteen < eight < 2 * sixteen


def test_adapters_train_faster_in_less_memory():
    whole, adapters = (predictions.predict(PUBLISHED | {"notes": notes}) for notes in ("", "LoRA fine-tuning"))
    assert float(adapters["predicted_step_time_s"]) < float(whole["predicted_step_time_s"])
    assert float(adapters["predicted_reserved_gib"]) < float(whole["predicted_reserved_gib"])


def test_a_plan_that_fills_the_device_is_slow_and_does_not_fit():
    plan = SWEPT | {"tp": "1", "pp": "1", "dp": "64", "grad_accum": "2", "sp": "False"}
    assert predictions.predict(plan)["predicted_fits"] == "False"
    assert predictions.is_full(run_table.run_of(plan))
    assert predictions.predict(SWEPT)["predicted_fits"] == "True"
