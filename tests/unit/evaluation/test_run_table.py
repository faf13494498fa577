"""How rows of tables of runs are read, and impossible ones refused."""

from __future__ import annotations

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.evaluation import run_table
from moreh_ap.plan import Plan

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


def test_a_row_of_the_sweep_is_its_own_plan():
    run = run_table.run_of(SWEPT)
    assert run.plan == Plan(
        4, tensor=4, sequence_parallel=True, pipeline=4, micro_batches=32, precision="bf16", recompute="none"
    )
    assert run.system.zero_stage == 1
    assert run.profile.parameters == pytest.approx(8.86e9, rel=2e-3)
    assert (run.cluster.num_devices, run.cluster.devices_per_node) == (64, 8)


def test_blank_columns_of_a_published_row():
    run = run_table.run_of(PUBLISHED)
    assert run.plan == Plan(1, 8, precision="bf16", recompute="selective")
    assert run.global_batch == 8
    assert run_table.run_of(PUBLISHED | {"fsdp": ""}).plan.shard == 8  # its program shards where nothing is said
    assert run_table.run_of(PUBLISHED | {"source": "NeMo-docs", "fsdp": ""}).plan.shard == 1
    assert run_table.run_of(PUBLISHED | {"notes": "local batch 4"}).plan.micro_batches == 4


def test_devices_that_share_a_row_count_as_replicas_with_short_rows():
    split = {"source": "NeMo-docs", "cp": "2", "dp": "4", "fsdp": "", "global_batch_sequences": "32"}
    run = run_table.run_of(PUBLISHED | split)
    assert (run.plan.replicate, run.profile.sequence_length, run.global_batch) == (8, 4096, 64)


@pytest.mark.parametrize("column", ["hidden", "n_layers", "seq_len", "n_gpus"])
def test_a_row_without_a_needed_number_says_which(column):
    with pytest.raises(OptionError, match=f"{column} is blank"):
        run_table.run_of(SWEPT | {column: ""})


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("tp", "3", "do not divide"),
        ("hidden", "wide", "hidden='wide'"),
        ("gpu", "Abacus", "unknown"),
        ("cp", "3", "cp=3"),
        ("micro_batch", "0", "micro_batch='0'"),
        ("tp", "1.5", "tp='1.5'"),
        ("gpus_per_node", "-1", "gpus_per_node='-1'"),
        ("n_layers", "nan", "n_layers='nan'"),
    ],
)
def test_an_impossible_row_says_why(column, value, said):
    with pytest.raises(OptionError, match=said):
        run_table.run_of(SWEPT | {column: value})
