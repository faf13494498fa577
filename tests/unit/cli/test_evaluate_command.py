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
