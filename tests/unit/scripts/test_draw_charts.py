"""Charts of the site show the figures of now, in both languages, as text, with colours for the dark."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def charts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import draw_charts

        yield draw_charts


@pytest.fixture
def figures(charts):
    """The module that knows where the measured figures are."""
    return importlib.import_module("benchmarks_page")


def test_committed_charts_show_the_figures_of_now(charts, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["draw_charts.py", "--check"])
    assert charts.main() == 0, capsys.readouterr().err


def test_no_chart_is_left_over_and_every_one_is_on_a_page(charts):
    wanted = {file for chart in charts.charts() for file in chart.files()}
    assert set(charts.CHARTS.glob("*.svg")) == wanted
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    for file in wanted:
        assert f"assets/charts/{file.name.replace('.ko.svg', '.svg')}" in pages, file.name


def test_a_figure_that_changes_is_noticed(charts, figures, tmp_path, monkeypatch, capsys):
    content = json.loads(figures.RESULTS.read_text())
    content["ddp"]["runs"] = [[whose, 2 * s if whose == "ours" else s] for whose, s in content["ddp"]["runs"]]
    (tmp_path / "benchmarks.json").write_text(json.dumps(content))
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "benchmarks.json")
    monkeypatch.setattr("sys.argv", ["draw_charts.py", "--check"])
    assert charts.main() == 1
    assert "docs/assets/charts/compare.svg is of other figures" in capsys.readouterr().err


def test_rows_are_those_of_the_tables(charts):
    page = charts.PLANNER_PAGE.read_text(encoding="utf-8")
    number = int(re.search(r"^(\d+) cases: median error", page, re.MULTILINE)[1])
    assert len(charts.tracked_memory()) == number
    rows = charts.comparison()
    assert [row["name"] for row in rows[:2]] == ["one line", "ddp"] and rows[0]["lines"] < rows[1]["lines"]


def test_words_are_the_same_in_both_languages(charts):
    words = json.loads(charts.WORDS.read_text(encoding="utf-8"))
    assert list(words["en"]) == list(words["ko"])


@pytest.mark.parametrize("language", ["en", "ko"])
def test_a_chart_is_drawn_with_text_and_a_dark_side(charts, language):
    chart = charts.Chart(
        "loss-any", {"steps": [5, 10], "losses": [3.0, 2.0], "held_out": [2.5, 2.25]}, charts.draw_losses
    )
    words = json.loads(charts.WORDS.read_text(encoding="utf-8"))[language]
    text = charts.svg_of(chart, words, narrow=False)
    ElementTree.fromstring(text)
    assert words["held out"] in text and words["loss"] in text and "prefers-color-scheme: dark" in text
    for colour in (charts.INK, charts.SOFT, charts.GRID, charts.PAGE):
        assert f": {colour}" in text, "a rule of the style would find nothing"
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text.split("</style>", 1)[1]))
    assert drawn <= {*charts.COLOURS, "#ffffff"}, "a colour without one for the dark"


@pytest.mark.parametrize("language", ["en", "ko"])
def test_a_chart_of_plans_has_each_plan_whole_and_colours_for_the_dark(charts, language):
    figures = charts.plan_charts.figures_of("llama3-70b")
    words = json.loads(charts.WORDS.read_text(encoding="utf-8"))[language]
    text = charts.svg_of(charts.Chart("plan-any", figures, charts.draw_plans), words, narrow=False)
    ElementTree.fromstring(text)
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text.split("</style>", 1)[1]))
    assert drawn <= {*charts.COLOURS, "#ffffff"}, "a colour without one for the dark"
    said = "".join(re.findall(r">([^<>]+)</text>", text)).replace(" ", "")
    for plan in figures["plans"]:
        assert plan["plan"] in said
        assert f"{plan['total']:.1f}GiB" in said
        assert sum(plan["parts"].values()) == pytest.approx(plan["total"], abs=0.05 * len(plan["parts"]) + 0.05)


def test_bars_are_the_memory_that_the_page_states(charts):
    chosen, published = charts.plan_charts.figures_of("llama3-70b")["plans"]
    assert sum(published["parts"].values()) > charts.plan_charts.figures_of("llama3-70b")["memory"]
    for language in ("", ".ko"):
        page = (charts.TUTORIALS / f"llama3-70b{language}.md").read_text(encoding="utf-8")
        assert f"{chosen['total']:.1f} GiB" in page and f"{published['total']:.1f} GiB" in page
    with pytest.raises(ValueError, match="no plans"):
        charts.plan_charts.figures_of("none")


def test_bars_have_the_totals_of_the_tables_of_flavours(charts):
    for tutorial, model in charts.plan_charts.OF_TUTORIALS.items():
        table = (ROOT / "docs" / "shared" / "flavours" / f"{model.lower()}.md").read_text(encoding="utf-8")
        for plan in charts.plan_charts.figures_of(tutorial)["plans"]:
            row = next(row for row in table.splitlines() if f"({plan['devices']})" in row)
            assert f"| {plan['total']:.1f} GiB |" in row


def test_step_times_read_as_in_the_table(charts):
    page = (ROOT / "docs" / "manual-or-one-line.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| \[`train_(\w+)\.py`\].*\| (x\d\.\d\d) ", page, re.MULTILINE))
    assert len(shown) >= 4
    assert {row["name"]: f"x{row['ratio'][0]:.2f}" for row in charts.comparison() if row["ratio"]} == shown
