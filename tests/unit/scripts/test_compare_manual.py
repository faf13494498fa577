"""The pages "by hand or with one line" are what their generator writes, and it counts what is in the files."""

from __future__ import annotations

import doctest
import json
import re
import string
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]
LANGUAGES = ("", ".ko")


@pytest.fixture(scope="module")
def tools():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import compare_manual
        import manual_counterparts
        import manual_runs
        import manual_sources

        yield SimpleNamespace(
            page=compare_manual,
            words=compare_manual.LANGUAGES,
            table=manual_counterparts,
            runs=manual_runs,
            sources=manual_sources,
        )


@pytest.fixture(scope="module")
def measured(tools):
    return json.loads(tools.page.MEASURED.read_text())


def shell_lines(page: str) -> list[str]:
    return [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]


def blanks(text: str) -> list[str]:
    return sorted(field for _, field, _, _ in string.Formatter().parse(text) if field)


def outside_code(page: str) -> str:
    return re.sub(r"```.*?```", "", page, flags=re.DOTALL)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_committed_page_is_what_the_scripts_and_figures_give(tools, measured, language):
    page = tools.page.PAGE.with_suffix(f"{language}.md").read_text(encoding="utf-8")
    assert page == tools.page.page_of(measured, tools.words[language]), "run `make compare`"


def test_check_names_the_page_that_is_another(tools, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tools.page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr("sys.argv", ["compare_manual.py"])
    assert tools.page.main() == 0
    monkeypatch.setattr("sys.argv", ["compare_manual.py", "--check"])
    assert tools.page.main() == 0
    korean = tmp_path / "page.ko.md"
    korean.write_text(korean.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert tools.page.main() == 1
    said = capsys.readouterr().err
    assert "page.ko.md is not what the scripts give" in said and "page.md " not in said


def test_languages_have_the_same_words(tools):
    assert tuple(tools.words) == LANGUAGES
    english, table = tools.words[""], tools.table
    assert set(english.scripts) == {counterpart.name for counterpart in table.COUNTERPARTS}
    assert set(english.concepts) == {*table.CONCEPTS.values(), *table.METHODS.values(), *table.VARIABLES.values()}
    for words in tools.words.values():
        assert list(words.concepts) == list(english.concepts)
        assert list(words.page) == list(english.page)
        for key, text in words.page.items():
            assert blanks(text) == blanks(english.page[key]), key
        for name, about in words.scripts.items():
            assert len(about.goes_wrong) == len(english.scripts[name].goes_wrong), name
            assert bool(about.note) == bool(english.scripts[name].note), name


def test_languages_have_the_same_anchors_code_and_figures(tools, measured):
    english, korean = (tools.page.page_of(measured, tools.words[language]) for language in LANGUAGES)
    assert re.findall("```.*?```", korean, re.DOTALL) == re.findall("```.*?```", english, re.DOTALL)
    english, korean = outside_code(english), outside_code(korean)
    assert re.search("[가-힣]", english) is None
    assert english.startswith("# By hand or with one line\n")
    headings = re.findall(r"^#+ .*$", korean, re.MULTILINE)
    assert all(re.search(r"[가-힣].* \{ #\S+ \}$", heading) for heading in headings)
    anchors = ["by-hand-or-with-one-line", *re.findall(r"\{ #(\S+) \}", english)]
    assert re.findall(r"\{ #(\S+) \}", korean) == anchors
    assert len(anchors) == len(headings) == 2 + len(tools.table.COUNTERPARTS)
    for pattern in (r"\]\((\S+)\)", r"^\|.*?\| (\**\+\d+ -\d+\** \| \d+) \|", r"\| (\S+e-\d+) \|", r"^- "):
        found = [re.findall(pattern, page, re.MULTILINE) for page in (english, korean)]
        assert found[0] and sorted(found[0]) == sorted(found[1]), pattern
    items = re.findall(r"^- .*$", korean, re.MULTILINE)
    assert all(re.search("[가-힣]", item) for item in items)


def test_a_line_more_in_a_script_is_a_line_more_on_the_page(tools, measured, monkeypatch):
    read = tools.page._text
    monkeypatch.setattr(tools.page, "_text", lambda path: read(path) + "\nmain()\n" * path.endswith("train_ddp.py"))
    pages = tools.page.PAGE.read_text(), tools.page.page_of(measured, tools.words[""])
    before, after = (re.findall(r"train_\w+\.py`\]\S* \| \+(\d+)", page) for page in pages)
    assert len(before) == len(tools.table.COUNTERPARTS)
    assert [int(count) for count in after] == [int(before[0]) + 1, *map(int, before[1:])]
    assert pages[1].count("\n    +main()\n") == 1


def test_shown_commands_are_those_that_tests_run(tools, measured):
    table = tools.table
    by_hand = {line for counterpart in table.COUNTERPARTS for lines in counterpart.commands for line in lines}
    shown = {table.SINGLE_COMMAND, table.ONE_LINE_COMMAND, *by_hand}
    assert set(shell_lines(tools.page.page_of(measured, tools.words[""]))) == shown
    assert set(shell_lines((ROOT / "tutorials" / "manual" / "README.md").read_text())) == shown
    for command in shown:
        path = next(word for word in command.split() if word.endswith(".py"))
        assert (ROOT / path).is_file(), path


def test_the_one_line_adds_the_line_and_the_flag_for_comparing(tools):
    single, one_line = ((ROOT / path).read_text() for path in (tools.table.SINGLE, tools.table.ONE_LINE))
    changed = [line for line in tools.sources.difference(single, one_line).splitlines() if line[0] in "+-"]
    assert len(changed) == 2 and all(line.startswith("+") for line in changed)
    assert '"--plan"' in changed[0] and "torch.moreh.option.enable_advanced_parallelization(" in changed[1]


def test_a_name_without_a_concept_is_refused(tools, tmp_path):
    script = tmp_path / "train_new.py"
    script.write_text("import torch.distributed as dist\n\ndist.all_reduce(1)\ndist.broadcast(1, 0)\n")
    with pytest.raises(tools.sources.UnknownName, match=r"train_new.py uses torch.distributed.broadcast, without"):
        tools.sources.concepts_of(script)
    script.write_text("from torch.distributed.pipelining import ScheduleZBVZeroBubble as Best\n\nBest()\n")
    with pytest.raises(tools.sources.UnknownName, match=r"torch.distributed.pipelining.ScheduleZBVZeroBubble"):
        tools.sources.concepts_of(script)


def test_every_row_of_the_tables_is_used(tools):
    table = tools.table
    paths = [ROOT / counterpart.path for counterpart in table.COUNTERPARTS]
    text = "\n".join(path.read_text() for path in paths)
    for name in (*table.CONCEPTS, *table.METHODS, *table.VARIABLES):
        assert re.search(rf"\b{name.rsplit('.', maxsplit=1)[-1]}\b", text), name
    found = {concept for path in paths for concept in tools.sources.concepts_of(path)}
    assert found == {*table.CONCEPTS.values(), *table.METHODS.values(), *table.VARIABLES.values()}


def test_what_a_script_borrows_comes_with_what_that_needs(tools, tmp_path):
    (tmp_path / "train_base.py").write_text(
        "import torch.distributed as dist\nNAMES = {1: 2}\n\n\ndef helper():\n    return NAMES\n\n\n"
        "def used():\n    dist.all_reduce(helper())\n\n\ndef unused():\n    return 3\n"
    )
    script = tmp_path / "train_top.py"
    script.write_text("from train_base import used\n\nused()\n")
    (texts,) = tools.sources.borrowed(script).values()
    assert [text.splitlines()[0] for text in texts] == ["NAMES = {1: 2}", "def helper():", "def used():"]
    assert tools.sources.concepts_of(script) == [tools.table.CONCEPTS["torch.distributed.all_reduce"]]


def test_only_code_counts(tools):
    outcome = doctest.testmod(tools.sources)
    assert outcome.attempted > 0 and outcome.failed == 0
    source = (
        '"""Text."""\n\nx = 1  # said\n\n\ndef f():\n    """Text\n    over two lines."""\n    # said\n    return "#"\n'
    )
    assert tools.sources.code_of(source) == ["x = 1", "def f():", '    return "#"']


def test_losses_that_differ_are_refused(tools, measured):
    entry = json.loads(json.dumps(measured["ddp"]))
    assert tools.runs.largest_difference(entry) <= tools.runs.HIGHEST_DIFFERENCE
    entry["losses"]["one_line_1"][-1] *= 1.0001
    with pytest.raises(ValueError, match=r"plan 'replicate=2': losses differ by 1\.0e-04; allowed are 1e-05"):
        tools.runs.largest_difference(entry)


def test_the_ratio_is_taken_within_pairs(tools):
    seconds = [(1.0, 2.0), (9.0, 10.0), (3.0, 2.0)]
    pairs = [{"one_line_s": ours, "by_hand_s": theirs} for ours, theirs in seconds]
    assert tools.runs.ratios_of({"pairs": pairs}) == (0.9, 0.5, 1.5)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_ratio_of_a_busy_machine_is_not_shown(tools, measured, language):
    words = tools.words[language]
    idle = {name: entry | {"load": [0.5, 3.5], "cores": 2} for name, entry in measured.items()}
    busy = idle | {"deepspeed": idle["deepspeed"] | {"load": [0.5, 30.0]}}
    rows = [re.findall(r"^\| \[.*$", tools.page.page_of(entries, words), re.MULTILINE) for entries in (idle, busy)]
    assert all(re.search(r"\| x\d+\.\d\d \(\d", row) for row in rows[0])
    (changed,) = (row for row in rows[1] if row not in rows[0])
    assert "train_deepspeed.py" in changed and changed.endswith(f"| {words.page['unknown']} |")


def test_pairs_take_turns_and_get_the_same_sizes(tools, monkeypatch):
    calls = []

    def run(script, flags, devices, threads, timeout_s):
        calls.append((script, flags, devices))
        return {"losses": [2.0, 1.0], "step_s": [9.0, 9.0, 0.5 if script == "one_line" else 1.0]}

    monkeypatch.setattr(tools.runs, "run", run)
    pipeline = next(one for one in tools.table.COUNTERPARTS if one.name == "pp")
    entry = tools.runs.measure(pipeline, tools.runs.run_alone(), num_pairs=2)
    assert [script for script, _, _ in calls] == ["single", "one_line", "pp", "pp", "one_line"]
    sizes = tools.runs.FLAGS.split()
    assert all(flags[: len(sizes)] == sizes for _, flags, _ in calls)
    by_hand, num_processes = calls[2][1:]
    assert by_hand[len(sizes) :] == ["--micro-batches", "4", "--schedule", "1f1b", "--split", "2+2"]
    assert num_processes == 2
    assert entry["pairs"] == [{"one_line_s": 0.5, "by_hand_s": 1.0}] * 2
    assert tools.runs.ratios_of(entry) == (0.5, 0.5, 0.5)
    assert tools.words[""].page["machine"].format(**tools.runs.machine_of(entry)) == entry["machine"]


def test_step_times_are_those_of_the_measured_page_on_every_page(tools, measured):
    """One figure, one value: the table of "Measured", the first pages (a test of theirs) and this page."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    titles = {"ddp": "DDP", "fsdp": "FSDP2", "tp": "`train_tp.py`", "pp": "`train_pp.py`", "3d": "`train_3d.py`"}
    rows = {name: next(row for row in text.splitlines() if f"against {what} |" in row
                       or f"against torchrun {what} |" in row) for name, what in titles.items()}  # fmt: skip
    for language in LANGUAGES:
        page = tools.page.page_of(measured, tools.words[language])
        for name, row in rows.items():
            median = re.search(r"x\d\.\d\d", row)[0]
            assert re.search(rf"^\| \[`train_{name}\.py`\].* \| {median} \(", page, re.MULTILINE), name


def test_a_script_without_a_figure_has_its_own_ratio_unless_the_machine_was_busy(tools, measured):
    entry = {**measured["ddp"], "pairs": [{"one_line_s": 3.0, "by_hand_s": 2.0}], "load": [0.0, 0.0]}
    assert tools.page.step_ratio_of("other", entry) == (1.5, 1.5, 1.5, 1)
    assert tools.page.step_ratio_of("other", {**entry, "load": [0.0, 40.0]}) is None
    assert tools.page.step_ratio_of("ddp", {**entry, "load": [0.0, 40.0]}) is not None
