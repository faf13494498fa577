"""The notebooks as files: run from the top, nothing of a machine in them, and pages of the site in both languages."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbformat, of the extra `dev`")
pytest.importorskip("nbconvert", reason="needs nbconvert, of the extra `dev`")

ROOT = Path(__file__).parents[2]


def script(name):
    """Returns one of the programs in `scripts` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute_notebooks, notebook_pages = script("execute_notebooks"), script("notebook_pages")
FOLDER = ROOT / "tutorials" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
PROMISED = {
    "quick_start",
    "inside_a_plan",
    "changing_the_number_of_devices",
    "from_ddp_to_one_line",
    "fine_tune_save_generate",
    "lora_adapters",
    "what_the_planner_predicts",
}


def load(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(name):
    return [cell for cell in load(name).cells if cell.cell_type == "code"]


def texts_of(cell):
    """Yields all text that a cell has put out."""
    for output in cell.outputs:
        yield output.get("text", "")
        yield output.get("data", {}).get("text/plain", "")


def test_all_notebooks_are_there():
    assert set(NAMES) >= PROMISED


@pytest.mark.parametrize("name", NAMES)
def test_was_run_once_from_the_top(name):
    cells = code_cells(name)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert not execute_notebooks.errors_of(cell), cell.id
        assert all(output.output_type != "error" for output in cell.outputs), cell.id


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_machine_or_the_run_is_in_it(name):
    notebook = load(name)
    assert notebook.metadata == execute_notebooks.METADATA
    for cell in notebook.cells:
        assert set(cell.metadata) <= set(execute_notebooks.KEPT_OF_CELLS), cell.id
        assert re.fullmatch(r"[a-z0-9-]+", cell.id) and not re.fullmatch(r"[0-9a-f]{8}", cell.id), "ids are words"
    for cell in code_cells(name):
        for text in texts_of(cell):
            assert not re.search(r"/(tmp|home|root|work)/", text), (cell.id, text)
            assert "\x1b" not in text, (cell.id, "colours of a terminal")


@pytest.mark.parametrize("name", NAMES)
def test_no_cell_can_pass_by_failing(name):
    for cell in code_cells(name):
        assert not re.search(r"nbval|PYTEST_VALIDATE|raises-exception", cell.source, re.IGNORECASE), cell.id
        assert not re.search(r"^\s*!|=\s*!|%(system|sx|sc)\b", cell.source, re.MULTILINE), "the exit code is lost"
        if cell.source.startswith("%%bash"):
            assert cell.source.splitlines()[0] == "%%bash" and cell.source.splitlines()[1] == "set -e", cell.id
    assert any("assert " in cell.source for cell in code_cells(name)[-2:]), "its claims are checked at the end"


@pytest.mark.parametrize("name", NAMES)
def test_begins_with_what_it_takes_and_ends_with_what_is_next(name):
    cells = load(name).cells
    assert all(word in cells[0].source for word in ("**You learn**", "| time |", "| hardware |"))
    assert cells[-1].source.startswith("## Next")


def test_every_pattern_that_hides_a_difference_is_used():
    shown = "\n".join(text for name in NAMES for cell in code_cells(name) for text in texts_of(cell))
    patterns = re.findall(r"^regex: (.*)$", (FOLDER / "sanitize.cfg").read_text(), re.MULTILINE)
    assert patterns
    for pattern in patterns:
        assert re.search(pattern, shown), pattern


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    notebook_pages.write_pages(FOLDER, folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_page_in_each_language_has_every_picture(name, pages):
    english, korean = ((pages / f"{name}{suffix}.md").read_text(encoding="utf-8") for suffix in ("", ".ko"))
    pictures = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", english)
    num_pictures = sum("image/png" in out.get("data", {}) for cell in code_cells(name) for out in cell.outputs)
    assert len(pictures) == num_pictures > 0
    assert [path for _, path in re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", korean)] == [path for _, path in pictures]
    for _, path in pictures:
        assert (pages / path).read_bytes().startswith(b"\x89PNG")
    assert english.startswith("# ") and korean.startswith("# ")
    assert english.count("```") == korean.count("```") and english.count("```") % 2 == 0
    assert not re.search(r"[가-힣]", english)
    for prose in re.split(r"```.*?```", korean, flags=re.DOTALL):
        assert not prose.strip() or re.search(r"[가-힣]", prose), prose


@pytest.mark.parametrize("name", NAMES)
def test_page_has_code_and_output_as_they_are(name, pages):
    page = (pages / f"{name}.md").read_text(encoding="utf-8")
    for cell in code_cells(name):
        assert cell.source.split("\n", 1)[-1].strip() in page, cell.id
        for text in texts_of(cell):
            if not text.startswith("<"):  # beside a picture, its class
                assert text.strip() in page, cell.id
    assert ".ipynb)" not in page and "../../docs" not in page


@pytest.fixture
def copied(tmp_path):
    """A folder with one notebook and its translation, two levels below one with a folder `docs`."""
    folder = tmp_path / "tutorials" / "notebooks"
    folder.mkdir(parents=True)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for path in FOLDER.glob("*.ipynb"):
        (folder / path.name).touch()
    for suffix in ("ipynb", "ko.md"):
        shutil.copy(FOLDER / f"quick_start.{suffix}", folder)
    return folder


def pages_of(copied):
    """Writes the pages of the one notebook that is whole."""
    notebook = notebook_pages.read(copied / "quick_start.ipynb")
    translated = notebook_pages.translated(notebook, copied / "quick_start.ko.md")
    for version in (notebook, translated):
        notebook_pages.with_links(notebook_pages.as_markdown(version, "quick_start_files")[0], copied / "quick_start")


def change(path, before, after):
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")


def test_the_copy_itself_is_whole(copied):
    pages_of(copied)


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        ("quick_start.ipynb", "nothing of the number", "of no", "since it changed: <!-- cell: loop-text"),
        ("quick_start.ipynb", '"alt": "Loss', '"alt": "A loss', "since it changed: <!-- cell: curves "),
        ("quick_start.ko.md", "<!-- cell: end-text", "<!-- cell: gone-text", "of no cell: <!-- cell: gone-text"),
        ("quick_start.ko.md", "<!-- cell: title", "text\n<!-- cell: title", "before the first head: 'text'"),
        ("quick_start.ipynb", '"alt":', '"other":', "the picture of cell curves needs a description"),
        ("quick_start.ipynb", '"execution_count": 3,', '"execution_count": null,', "has not been run"),
        ("quick_start.ko.md", "docs/exactness.md", "docs/exactly.md", "docs/exactly.md, which does not exist"),
        ("quick_start.ko.md", "../../docs/exactness.md", "../notebooks", "links to ../notebooks, which is neither"),
    ],
)
def test_what_does_not_fit_is_refused(copied, file, before, after, said):
    change(copied / file, before, after)
    with pytest.raises(notebook_pages.PageError, match=said):
        pages_of(copied)


def test_missing_translation_is_refused(copied):
    (copied / "quick_start.ko.md").unlink()
    with pytest.raises(notebook_pages.PageError, match=r"quick_start\.ko\.md is missing"):
        pages_of(copied)
