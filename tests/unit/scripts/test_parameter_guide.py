"""The parameter guide has every published row, its plans are plans for the devices beside them, in every language."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moreh_ap.flavours import FLAVOURS
from moreh_ap.plan import Plan
from moreh_ap.planner.search.candidate import evaluate_plan

ROOT = Path(__file__).parents[3]
LANGUAGES = ("", ".ko")
TITLED = ("head", "own", "beside", "times", "speeds")


@pytest.fixture(scope="module")
def guide():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import parameter_guide

        yield parameter_guide


def tables(guide, language):
    """Returns the tables of a page as lists of cells: one a model, memory, times, speeds."""
    page = guide.PAGE.with_suffix(f"{language}.md").read_text(encoding="utf-8")
    found = [
        re.findall(r"^\|.*\|$", section, re.MULTILINE)[2:] for section in re.split(r"^###? ", page, flags=re.M)[1:]
    ]
    return [[[cell.strip() for cell in line[1:-1].split("|")] for line in lines] for lines in found if lines]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_published_row_is_on_the_page(guide, language):
    *_, memory, times, _ = tables(guide, language)
    assert len(memory) == len(times) == len(guide.PUBLISHED) == 18
    for held, timed, row in zip(memory, times, guide.PUBLISHED):
        assert held[:2] == timed[:2] == [f"{row.model}, {row.flavour}", f"{row.batch} x {row.length:,}"]
        assert held[5] == f"{row.memory_mib:,}" and timed[5] == str(row.minutes)
        assert Plan.parse(held[2].strip("`")).num_devices == FLAVOURS[row.flavour]


@pytest.mark.parametrize("language", LANGUAGES)
def test_plans_of_the_other_tables_are_for_their_devices(guide, language):
    *own, _, _, speeds = tables(guide, language)
    assert len(own) == len(guide.MODELS)
    for rows in own:
        assert [row[0] for row in rows if row[0]] == [one.replace("x", "\u00a0x\u00a0") for one in guide.ACCELERATORS]
        for column in range(len(guide.SHAPES)):
            assert sum(bool(row[3 + column]) for row in rows) == len(guide.ACCELERATORS)
    assert len([row for row in speeds if row[0]]) == len(guide.SPEEDS)
    for rows in (*own, speeds):
        devices = 0
        for cells in rows:
            devices = int(re.search(r"(\d+)\sx\s[A-Z]", cells[0])[1]) if cells[0] else devices
            for plan in (cell.strip("`") for cell in cells if cell.startswith("`")):
                assert Plan.parse(plan).num_devices == devices


def test_languages_say_the_same(guide):
    english, korean = (guide.LANGUAGES[language] for language in LANGUAGES)
    assert list(english) == list(korean)
    said = {korean[key]: english[key] for key in ("nothing_fits", "theirs", "ours", "measured", "does_not_fit")}
    for one, other in zip(tables(guide, ""), tables(guide, ".ko"), strict=True):
        translated = [[_replaced(cell, said) for cell in row] for row in other]
        assert translated == one
    anchors = [re.findall(r"^#+ (.*)$", english[key], re.MULTILINE)[0].lower().replace(" ", "-") for key in TITLED]
    assert [re.findall(r"^#.*\{+ #([\w-]+) \}+$", korean[key], re.MULTILINE)[0] for key in TITLED] == anchors


def _replaced(cell, said):
    for word, english in said.items():
        cell = cell.replace(word, english)
    return cell


def test_a_published_plan_is_weighed_as_it_is_written(guide):
    model, devices, batch, plan, _ = guide.SPEEDS[2]
    task, _ = guide.answer_for(model, f"{devices}xMI250", batch, 1024)
    candidate = evaluate_plan(task, Plan.parse(plan))
    said = candidate.plan.platform_line(batch)
    assert said.startswith("num_stages : 8, num_micro_batches : 64, batch_per_device : 1, No TP")
    assert "recomputation : 2, distribute_param : true" in said
    fullest_mib = candidate.memory.reserved_bytes / 2**20
    assert 0.5 * devices * fullest_mib < guide.sum_mib(task, candidate.plan) <= devices * fullest_mib


@pytest.mark.parametrize("model", ["Cerebras-GPT-13B", "Mistral-7B", "Llama2-13B", "Llama3-70B"])
def test_tutorials_show_figures_of_the_guide(guide, model):
    """Batch and tokens a second of each accelerator are those of a row of the guide, in every language."""
    assert model in guide.TUTORIALS
    for language in LANGUAGES:
        *own, _, times, speeds = tables(guide, language)
        known = {(cells[1], cells[3]) for cells in times if cells[0].startswith(f"{model},")}
        title = ""
        for cells in speeds:
            title = cells[0] or title
            known |= {(title.rsplit(", ", 1)[1], cells[4])} if title.startswith(f"{model},") else set()
        of_model = own[guide.MODELS.index(model)] if model in guide.MODELS else []
        known |= {("256 x 1,024", cells[3].split(" ")[0]) for cells in of_model}
        file = guide.DOCS / "shared" / "flavours" / f"{model.lower()}{language}.md"
        rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in file.read_text("utf-8").splitlines()[2:]]
        assert len(rows) == 3
        for accelerator, batch, _, speed in rows:
            flavour, devices = accelerator.rstrip(")").split(" (")
            assert int(devices) == FLAVOURS[flavour]
            assert (batch, speed) in known
        pages = (guide.DOCS / "tutorials").glob(f"*{language}.md")
        assert any(f"docs/shared/flavours/{file.name}" in page.read_text("utf-8") for page in pages)
