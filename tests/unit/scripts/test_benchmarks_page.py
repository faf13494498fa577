"""The page of measured figures is what results and code give: stale figures are marked, and a lost mark is noticed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]
NAME = "ddp"


@pytest.fixture(scope="module")
def tools():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import bench
        import bench_figures
        import bench_overhead
        import benchmarks_page

        yield SimpleNamespace(bench=bench, figures=bench_figures, overhead=bench_overhead, page=benchmarks_page)


@pytest.fixture
def code(tools, tmp_path, monkeypatch):
    """A file that one figure is about."""
    file = tmp_path / "code.py"
    file.write_text("first\n")
    figure = replace(tools.figures.FIGURES[NAME], paths=("*.py",))
    monkeypatch.setitem(tools.figures.FIGURES, NAME, figure)
    monkeypatch.setattr(tools.page, "digest", lambda paths: tools.figures.digest(paths, tmp_path))
    return file


def entry(tools, folder, **more):
    runs = [["ours", 2.0], ["theirs", 1.0], ["theirs", 4.0], ["ours", 4.4]]
    values = {"date": "2026-01-02", "commit": "abc", "command": "c", "mode": "steps", "runs": runs}
    return {**values, "digest": tools.figures.digest(("*.py",), folder), **more}


@pytest.mark.parametrize("language", ["", ".ko"])
def test_the_committed_page_is_what_the_results_and_the_code_give(tools, language):
    page = tools.page.PAGE.with_suffix(f"{language}.md").read_text(encoding="utf-8")
    results = tools.page.read_results()
    assert page == tools.page.page_of(page, results, tools.page.LANGUAGES[language]), "run scripts/benchmarks_page.py"


def test_a_figure_is_marked_when_its_code_changes_and_a_lost_mark_is_noticed(tools, code, tmp_path, monkeypatch):
    results = {NAME: entry(tools, tmp_path)}
    (tmp_path / "results.json").write_text(json.dumps(results))
    for language in tools.page.LANGUAGES:
        (tmp_path / f"page{language}.md").write_text(f"text\n\n{tools.page.BEGIN}\n\n{tools.page.END}\n\nmore\n")
    arguments = ["benchmarks_page.py", "--results", str(tmp_path / "results.json"), "--page", str(tmp_path / "page.md")]

    def check():
        monkeypatch.setattr("sys.argv", [*arguments, "--check"])
        return tools.page.main()

    def write():
        monkeypatch.setattr("sys.argv", arguments)
        assert tools.page.main() == 0
        return (tmp_path / "page.md").read_text(encoding="utf-8")

    fresh = write()
    assert "stale" not in fresh and fresh.startswith("text\n") and fresh.endswith("\nmore\n") and check() == 0
    code.write_text("second\n")
    assert check() == 1, "the mark is missing"
    stale = write()
    assert stale.count("**stale**") == 1 and check() == 0
    (tmp_path / "page.ko.md").write_text(fresh)
    assert check() == 1
    code.write_text("first\n")
    assert write() == fresh


def test_a_digest_knows_names_and_contents_and_refuses_globs_without_files(tools, code, tmp_path):
    before = tools.figures.digest(("*.py",), tmp_path)
    code.rename(tmp_path / "other.py")
    assert tools.figures.digest(("*.py",), tmp_path) != before
    with pytest.raises(ValueError, match="no file is called"):
        tools.figures.digest(("none/*.py",), tmp_path)


def test_every_figure_is_about_files_that_are_there_and_has_a_title_in_every_language(tools):
    for name, figure in tools.figures.FIGURES.items():
        assert name == figure.name and tools.figures.digest(figure.paths)
        assert figure.same_runs_as in ("", *tools.figures.FIGURES)
        if figure.baseline:
            assert tools.bench.overhead_arguments(figure).against == [figure.baseline]
    for words in tools.page.LANGUAGES.values():
        assert set(words.titles) == set(tools.figures.FIGURES)


def test_pairs_and_equal_runs(tools, tmp_path, code):
    pairs, neighbours = tools.page.compared(entry(tools, tmp_path))
    assert pairs == pytest.approx([2.0, 1.1]) and neighbours == [4.0]
    pairs, neighbours = tools.page.compared(entry(tools, tmp_path, mode="empty"))
    assert pairs == pytest.approx([1.0, 0.4]) and neighbours == [3.0]


def test_the_interval_of_a_median(tools):
    assert tools.page.interval([3.0, 1.0, 2.0]) == (1.0, 3.0, 0.75)
    low, high, coverage = tools.page.interval([float(value) for value in range(6)])
    assert (low, high) == (0.0, 5.0) and coverage == pytest.approx(0.96875)
    low, high, coverage = tools.page.interval([float(value) for value in range(9)])
    assert (low, high) == (1.0, 7.0) and coverage == pytest.approx(0.9609375)
    assert tools.page.interval([1.0]) == (1.0, 1.0, 0.0)


def test_the_command_keeps_what_it_measures_and_writes_the_page(tools, tmp_path, monkeypatch):
    orders = []

    def run_both(args, mode, baseline, ours_first):
        orders.append(ours_first)
        report = {"losses": [1.0] * args.steps, "step_s": [0.5] * args.steps, "first_step_s": 7.0}
        scripts = (tools.overhead.ONE_LINE, baseline)
        return dict.fromkeys(scripts if ours_first else scripts[::-1], report)

    written = []
    monkeypatch.setattr(tools.overhead, "run_both", run_both)
    monkeypatch.setattr(tools.page, "write_pages", written.append)
    monkeypatch.setattr(tools.bench, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(
        "sys.argv", ["bench.py", "startup", "--pairs", "3", "--results", str(tmp_path / "results.json")]
    )
    assert tools.bench.main() == 0
    (results,) = written
    assert results == tools.page.read_results(tmp_path / "results.json")
    assert orders == [True, False, True] and set(results) == {"ddp", "startup"}, "the same runs give both"
    assert results["startup"]["runs"][:3] == [["ours", 7.0], ["theirs", 7.0], ["theirs", 7.0]]
    assert not tools.page.is_stale("ddp", results["ddp"])
    page = tools.page.part_of(results, tools.page.ENGLISH)
    assert results["ddp"]["machine"] in page and "**stale**" not in page and "x1.00 to x1.00 (75%)" in page


def test_a_figure_that_another_script_prints(tools, monkeypatch, tmp_path):
    monkeypatch.setattr(tools.bench, "ROOT", tmp_path)
    (tmp_path / "code.py").write_text("")
    monkeypatch.setattr(tools.bench, "circumstances", lambda figure: entry(tools, tmp_path))
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "bench_split.py").write_text("import sys\nprint('[info] no')\nprint(sys.argv[1:])\n")
    found = tools.bench.measure_printed(tools.figures.FIGURES["split"], 2)
    assert found["printed"] == ["['--rounds', '2']"] and found["command"] == "bench_split.py --rounds 2"
    page = tools.page.part_of({"split": found}, tools.page.ENGLISH)
    assert "```text\n['--rounds', '2']\n```" in page and "{ #figure-split }" in page


def test_an_unknown_figure_is_refused(tools, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench.py", "speed"])
    with pytest.raises(SystemExit):
        tools.bench.main()
    assert "no figure is called speed: there are ddp" in capsys.readouterr().err


def test_figures_that_were_measured_alike_share_one_line(tools, tmp_path, code, monkeypatch):
    monkeypatch.setattr(tools.page, "is_stale", lambda name, entry: False)
    shared = {"machine": "2 x Processor, 24 GiB", "versions": "torch 2"}
    results = {
        "ddp": entry(tools, tmp_path, **shared, load=0.5, losses_differ_by=1e-7),
        "fsdp": entry(tools, tmp_path, **shared, load=2.0, losses_differ_by=0.0),
    }
    page = tools.page.part_of(results, tools.page.ENGLISH)
    assert page.count("Measured on") == 1 and "0.5 to 2.0" in page and "1e-07" in page
    results["tensor"] = entry(tools, tmp_path, machine="another", versions="torch 2", load=1.0)
    page = tools.page.part_of(results, tools.page.ENGLISH)
    assert page.count("Measured on") == 2
    assert f"{tools.page.ENGLISH.titles['tensor']}: Measured on another" in page


def test_a_table_of_box_characters_becomes_one_of_the_page(tools):
    lines = ["┏━━━┳━━━┓", "┃ a ┃ b ┃", "┡━━━╇━━━┩", "│ 1 │ 2 │", "└───┴───┘"]
    assert tools.page.table_of(lines) == ["| a | b |", "|---|---|", "| 1 | 2 |"]
    assert tools.page.table_of(["round 1: 2 s", *lines]) == []


def test_a_printed_table_reads_in_the_language_of_its_page(tools):
    lines = ["┏━━━┓", "┃ script ┃ line, ms a step ┃", "┡━━━┩", "│ small │ 2 (1.5 to 2.5), x1.1 │", "└───┘"]
    assert tools.page.table_of(lines, tools.page.KOREAN) == [
        "| 스크립트 | 한 줄, 스텝당 ms |",
        "|---|---|",
        "| small | 2 (1.5~2.5), x1.1 |",
    ]
