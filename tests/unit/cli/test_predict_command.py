"""`moreh-ap predict`: the columns that it appends, and tables that it refuses."""

from __future__ import annotations

import csv

import pytest

from moreh_ap.cli import predict_command
from moreh_ap.errors import OptionError
from moreh_ap.evaluation import predictions
from unit.cli.samples import command, write
from unit.evaluation.samples import SWEPT


def test_predict_appends_columns_and_counts_what_it_cannot_predict(tmp_path, capsys):
    write(tmp_path / "runs.csv", [SWEPT, SWEPT | {"hidden": ""}, SWEPT | {"tp": "8", "pp": "2"}])
    assert command(predict_command, tmp_path / "runs.csv", "-o", tmp_path / "out.csv") == 0
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        first, second, third = csv.DictReader(file)
    assert {name: first[name] for name in SWEPT} == SWEPT
    assert {name: first[name] for name in predictions.PREDICTED_COLUMNS} == predictions.predict(SWEPT)
    assert [second[name] for name in predictions.PREDICTED_COLUMNS] == [""] * 5
    assert third["predicted_step_time_s"] != first["predicted_step_time_s"]
    said = capsys.readouterr()
    assert "2 of 3 rows predicted" in said.out
    assert "no prediction for 1 row: hidden is blank" in said.err


@pytest.mark.parametrize("content", [None, "", "a,b\n1,2\n", ",".join(SWEPT) + "\n"])
def test_a_table_that_is_none_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "runs.csv").write_text(content, encoding="utf-8")
    with pytest.raises(OptionError):
        command(predict_command, tmp_path / "runs.csv", "-o", tmp_path / "out.csv")


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    write(tmp_path / "runs.csv", [SWEPT])
    with pytest.raises(OptionError, match="cannot write"):
        command(predict_command, tmp_path / "runs.csv", "-o", tmp_path / "missing" / "out.csv")
