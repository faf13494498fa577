"""`moreh-ap evaluate`: the figures that it prints."""

from __future__ import annotations

import argparse
import csv

from moreh_ap.cli import evaluate_command

SWEPT = {
    "n_params_b": "8.86", "n_layers": "32", "hidden": "4096", "ffn_hidden": "14336", "n_heads": "32",
    "n_kv_heads": "", "vocab": "131072", "seq_len": "4096", "global_batch_sequences": "256", "gpu": "H100-80GB",
    "n_gpus": "64", "gpus_per_node": "8", "precision": "bf16", "dp": "4", "fsdp": "1", "tp": "4", "sp": "True",
    "cp": "1", "pp": "4", "micro_batch": "2", "recompute": "none", "status": "Success", "oom_error": "False",
    "zero_stage": "1", "grad_accum": "32", "after_pp_fix": "True", "tied_embeddings": "False",
    "tokens_per_s_per_gpu": "4000", "mem_reserved_gib": "30", "nccl_allreduce_gbps": "97",
}  # fmt: skip


def write(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def command(module, *words):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(word) for word in words]), [])


def test_evaluate_prints_the_figures(tmp_path, capsys):
    write(tmp_path / "runs.csv", [SWEPT | {"micro_batch": str(2**power)} for power in range(6)])
    assert command(evaluate_command, tmp_path / "runs.csv") == 0
    said = capsys.readouterr().out
    for name in ("accuracy", "reserved_median_abs_error", "time_median_abs_error", "spearman_mean", "top3_median"):
        assert name in said
