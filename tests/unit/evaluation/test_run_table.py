"""How rows of tables of runs are read, and impossible ones refused."""

from __future__ import annotations

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.evaluation import run_table
from moreh_ap.plan import Plan
from unit.evaluation.samples import PUBLISHED, SWEPT


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
