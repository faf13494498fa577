"""Tables of runs: how rows are read, what is not looked at, the two commands, and the definitions of the figures."""

from __future__ import annotations

import argparse
import csv
import io

import pytest

from moreh_ap.cli import evaluate as evaluate_command
from moreh_ap.cli import predict as predict_command
from moreh_ap.errors import OptionError
from moreh_ap.evaluation import predictions, run_table
from moreh_ap.evaluation.accuracy import evaluate, spearman
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
    assert run.practice.zero_stage == 1
    assert run.profile.parameters == pytest.approx(8.86e9, rel=2e-3)
    assert (run.cluster.num_devices, run.cluster.devices_per_node) == (64, 8)


def test_what_was_measured_is_not_looked_at():
    otherwise = SWEPT | dict.fromkeys(run_table.MEASURED_COLUMNS, "nonsense")
    without = {name: value for name, value in SWEPT.items() if name not in run_table.MEASURED_COLUMNS}
    assert predictions.predict(SWEPT) == predictions.predict(otherwise) == predictions.predict(without)


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


# -- the commands ------------------------------------------------------------------------------------------------------


def write(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def command(*words):
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    predict_command.add_arguments(commands)
    evaluate_command.add_arguments(commands)
    arguments = parser.parse_args([str(word) for word in words])
    return arguments.run(arguments, [])


def test_predict_appends_columns_and_counts_what_it_cannot_predict(tmp_path, capsys):
    write(tmp_path / "runs.csv", [SWEPT, SWEPT | {"hidden": ""}, SWEPT | {"tp": "8", "pp": "2"}])
    assert command("predict", tmp_path / "runs.csv", "-o", tmp_path / "out.csv") == 0
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        first, second, third = csv.DictReader(file)
    assert {name: first[name] for name in SWEPT} == SWEPT
    assert {name: first[name] for name in predictions.PREDICTED_COLUMNS} == predictions.predict(SWEPT)
    assert [second[name] for name in predictions.PREDICTED_COLUMNS] == [""] * 5
    assert third["predicted_step_time_s"] != first["predicted_step_time_s"]
    said = capsys.readouterr()
    assert "2 of 3 rows predicted" in said.out
    assert "no prediction for 1 rows: hidden is blank" in said.err


def test_evaluate_prints_the_figures(tmp_path, capsys):
    write(tmp_path / "runs.csv", [SWEPT | {"micro_batch": str(2**power)} for power in range(6)])
    assert command("evaluate", tmp_path / "runs.csv") == 0
    said = capsys.readouterr().out
    for name in ("accuracy", "reserved_median_abs_error", "time_median_abs_error", "spearman_mean", "top3_median"):
        assert name in said


@pytest.mark.parametrize("content", [None, "", "a,b\n1,2\n", ",".join(SWEPT) + "\n"])
def test_a_table_that_is_none_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "runs.csv").write_text(content, encoding="utf-8")
    with pytest.raises(OptionError):
        command("predict", tmp_path / "runs.csv", "-o", tmp_path / "out.csv")


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    write(tmp_path / "runs.csv", [SWEPT])
    with pytest.raises(OptionError, match="cannot write"):
        command("predict", tmp_path / "runs.csv", "-o", tmp_path / "missing" / "out.csv")


# -- the figures -------------------------------------------------------------------------------------------------------

SYNTHETIC = """\
n_params_b,n_gpus,seq_len,global_batch_sequences,pp,after_pp_fix,status,tokens_per_s_per_gpu,mem_reserved_gib,\
predicted_reserved_gib,predicted_fits,predicted_step_time_s
1.0,8,1024,256,1,False,Success,1000,10,11,True,30
1.0,8,1024,256,1,False,Success,2000,20,19,True,22
1.0,8,1024,256,2,True,Success,1500,30,33,False,20
1.0,8,1024,256,2,False,Success,9000,40,44,True,1
1.0,8,1024,256,4,True,Success,500,50,40,True,40
1.0,8,1024,256,4,True,Success,800,60,66,True,41
1.0,8,1024,256,4,True,Success,400,70,66,True,19
1.0,8,1024,256,4,True,OOM,,,70,True,10
1.0,8,1024,256,4,True,OOM,,,90,False,10
1.0,8,1024,128,1,True,Success,100,10,10,True,10
1.0,8,1024,256,1,True,Other,700,,12,True,10
2.0,16,1024,256,1,True,Success,300,10,,,60
3.0,16,1024,256,1,True,Success,300,10,15,True,40
3.0,16,1024,256,1,True,Success,500,10,12,True,50
3.0,16,1024,256,8,True,Success,400,10,9,True,50
3.0,16,1024,256,1,True,Success,350,10,9,True,51
3.0,16,1024,256,1,True,Success,200,10,9,True,90
"""
EXPECTED = {
    "rows": 17,
    "feasible_rows": 15,
    "tp": 12,
    "fp": 1,
    "tn": 1,
    "fn": 1,
    "accuracy": 0.8667,
    "oom_among_called_fitting": 0.0769,
    "fitting_thrown_away": 0.0769,
    "reserved_median_abs_error": 0.1,
    "time_rows": 12,
    "time_median_abs_error": 0.1597,
    "time_mean_abs_error": 0.2476,
    "groups": 2,
    "spearman_mean": 0.1938,
    "top1_median": 2.3333,
    "top1_mean": 2.3333,
    "top3_median": 0.0,
    "top3_mean": 0.0,
}


def test_figures_by_their_definitions():
    """The expected values are what an independent program with these definitions gives for this table."""
    found = evaluate(list(csv.DictReader(io.StringIO(SYNTHETIC))))
    assert {name: round(value, 4) for name, value in found.items()} == EXPECTED


def test_published_runs_are_compared_by_tokens_and_none_may_beat_the_hardware():
    good = PUBLISHED | {"predicted_tokens_per_s_per_gpu": "6270"}
    timed = PUBLISHED | {
        "tokens_per_s_per_gpu": "", "step_time_s": "2", "global_batch_sequences": "8",
        "predicted_tokens_per_s_per_gpu": "2048",
    }  # fmt: skip
    wild = PUBLISHED | {"predicted_tokens_per_s_per_gpu": "40000"}
    found = evaluate([good, timed, wild, PUBLISHED])
    assert (found["published_rows"], found["above_peak"]) == (3, 1)
    assert found["published_median_abs_error"] == pytest.approx(0.5)


def test_ranks_of_equal_values_are_shared():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert spearman([1, 1], [1, 2]) == 0.0
