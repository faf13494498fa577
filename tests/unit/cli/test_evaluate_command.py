"""`moreh-ap evaluate`: the figures that it prints."""

from __future__ import annotations

from moreh_ap.cli import evaluate_command
from unit.cli.samples import command, write
from unit.evaluation.samples import SWEPT


def test_evaluate_prints_the_figures(tmp_path, capsys):
    write(tmp_path / "runs.csv", [SWEPT | {"micro_batch": str(2**power)} for power in range(6)])
    assert command(evaluate_command, tmp_path / "runs.csv") == 0
    said = capsys.readouterr().out
    for name in ("accuracy", "reserved_median_abs_error", "time_median_abs_error", "spearman_mean", "top3_median"):
        assert name in said


def test_evaluate_says_that_a_table_has_nothing_measured(tmp_path, capsys):
    measured = ("status", "mem_reserved_gib", "tokens_per_s_per_gpu")
    write(tmp_path / "runs.csv", [{name: value for name, value in SWEPT.items() if name not in measured}])
    assert command(evaluate_command, tmp_path / "runs.csv") == 0
    said = capsys.readouterr()
    assert said.out.split() == ["rows", "1"] and "no measured value to compare" in said.err
    write(tmp_path / "runs.csv", [SWEPT])
    assert command(evaluate_command, tmp_path / "runs.csv") == 0
    assert "no measured value" not in capsys.readouterr().err


def test_evaluate_compares_speeds_of_a_table_without_the_columns_of_the_sweep(tmp_path, capsys):
    write(tmp_path / "runs.csv", [{k: v for k, v in SWEPT.items() if k not in ("n_params_b", "after_pp_fix", "pp")}])
    assert command(evaluate_command, tmp_path / "runs.csv") == 0
    assert "time_median_abs_error" in capsys.readouterr().out
