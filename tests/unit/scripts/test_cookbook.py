"""The cookbook is what the planner says, for its devices, and the same in every language."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moreh_ap.plan import Plan

ROOT = Path(__file__).parents[3]
LANGUAGES = ("", ".ko")


@pytest.fixture(scope="module")
def cookbook():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import cookbook

        yield cookbook


def rows_of(cookbook, language):
    """Returns the cells of every row."""
    page = cookbook.PAGE.with_suffix(f"{language}.md").read_text(encoding="utf-8")
    lines = page.split(cookbook.BEGIN)[1].split(cookbook.END)[0].splitlines()
    rows = [line for line in lines if line.startswith("| ") and line != cookbook.LANGUAGES[language].columns]
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]


def test_the_pages_are_what_the_planner_says(cookbook, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cookbook.py", "--check"])
    assert cookbook.main() == 0, capsys.readouterr().err


def test_every_model_is_there_on_every_machine_in_full_and_with_adapters(cookbook):
    for language in LANGUAGES:
        rows = rows_of(cookbook, language)
        assert len(rows) == len(cookbook.MODELS) * len(cookbook.MACHINES) * 2
        plans = [(machine, cell.strip("`")) for machine, _, cell, *_ in rows if cell.startswith("`")]
        assert len(plans) > len(rows) / 2
        assert all(Plan.parse(plan).num_devices == int(machine.split(" x ")[0]) for machine, plan in plans)


def test_languages_have_the_same_plans_and_figures(cookbook):
    numbers = [[re.findall(r"`[^`]+`|\d[\d.]*", " ".join(row)) for row in rows_of(cookbook, one)] for one in LANGUAGES]
    assert numbers[0] == numbers[1]


def test_adapters_need_less_than_all_weights(cookbook):
    _, full = cookbook.answer_for("Llama3-8B", "8xH100-80GB", 64, 2048)
    task, adapters = cookbook.answer_for("Llama3-8B", "8xH100-80GB", 64, 2048, cookbook.RANK)
    assert not task.system.trains_weights and adapters.plan.tensor == adapters.plan.pipeline == 1
    assert adapters.step.total_s < full.step.total_s


def test_a_page_that_is_out_of_date_is_noticed_and_a_lost_mark_too(cookbook, tmp_path, monkeypatch, capsys):
    for language in LANGUAGES:
        text = cookbook.PAGE.with_suffix(f"{language}.md").read_text(encoding="utf-8")
        (tmp_path / f"page{language}.md").write_text(text.replace("GiB | ", "GB | ", 1), encoding="utf-8")
    monkeypatch.setattr(cookbook, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr("sys.argv", ["cookbook.py", "--check"])
    assert cookbook.main() == 1 and "page.ko.md" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["cookbook.py"])
    assert cookbook.main() == 0
    monkeypatch.setattr("sys.argv", ["cookbook.py", "--check"])
    assert cookbook.main() == 0
    with pytest.raises(ValueError, match="each once"):
        cookbook.page_of("no marks", cookbook.LANGUAGES[""])
