"""Predictions for rows: what was measured is not looked at, and what makes a run faster or smaller."""

from __future__ import annotations

from moreh_ap.evaluation import predictions, run_table

SWEPT = {
    "n_params_b": "8.86", "n_layers": "32", "hidden": "4096", "ffn_hidden": "14336", "n_heads": "32",
    "n_kv_heads": "", "vocab": "131072", "seq_len": "4096", "global_batch_sequences": "256", "gpu": "H100-80GB",
    "n_gpus": "64", "gpus_per_node": "8", "precision": "bf16", "dp": "4", "fsdp": "1", "tp": "4", "sp": "True",
    "cp": "1", "pp": "4", "micro_batch": "2", "recompute": "none", "status": "Success", "oom_error": "False",
    "zero_stage": "1", "grad_accum": "32", "after_pp_fix": "True", "tied_embeddings": "False",
    "tokens_per_s_per_gpu": "4000", "mem_reserved_gib": "30", "nccl_allreduce_gbps": "97",
}  # fmt: skip
PUBLISHED = {
    "source": "torchtitan", "model": "Llama3-8B", "n_params_b": "8.03", "n_layers": "32", "hidden": "4096",
    "ffn_hidden": "14336", "n_heads": "32", "n_kv_heads": "8", "vocab": "128256", "seq_len": "8192",
    "global_batch_sequences": "", "gpu": "H100-80GB", "n_gpus": "8", "gpus_per_node": "", "precision": "bf16",
    "dp": "8", "fsdp": "8", "tp": "1", "sp": "False", "cp": "1", "pp": "1", "vpp": "", "micro_batch": "1",
    "recompute": "selective", "tokens_per_s_per_gpu": "5700", "step_time_s": "", "notes": "",
}  # fmt: skip


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
