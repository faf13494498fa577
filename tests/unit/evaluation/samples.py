"""Rows of tables of runs."""

from __future__ import annotations

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
