"""What the documentation says of arguments, variables and plans is what the code has; examples run."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

from moreh_ap import option, settings
from moreh_ap.local import logger
from moreh_ap.plan import Plan
from moreh_ap.plan_checks import WORDS, spell

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OPTIONS = (DOCS / "ap" / "advanced-settings.md").read_text(encoding="utf-8")


def table(heading):
    """Returns the cells of the first table under a heading, row by row, without its head."""
    section = OPTIONS.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\|.*\|$", section, re.MULTILINE)[2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_every_argument_is_documented_with_its_default():
    parameters = inspect.signature(option.enable_advanced_parallelization).parameters
    rows = table("The one line")
    assert [row[0] for row in rows] == list(parameters)
    for name, _, default, _ in rows:
        if parameters[name].default is not None:
            assert default == repr(parameters[name].default)


def test_every_variable_is_documented_with_its_default():
    documented = {row[0]: row[1] for row in table("Environment")}
    names = {value for name, value in vars(settings).items() if name.endswith("_VARIABLE")} | {logger.LEVEL_VARIABLE}
    assert set(documented) == names
    defaults = settings.resolve_options({})
    assert documented[settings.COMPILE_THREADS_VARIABLE] == str(defaults.max_parallel_compile_threads)
    assert documented[settings.DETAILED_LOG_VARIABLE] == str(defaults.detailed_log)
    assert documented[settings.MEMORY_RATIO_VARIABLE] == str(defaults.memory_usage_correction_ratio)


def test_plan_table_and_example():
    rows = {row[0]: row[1] for row in table("Plans")}
    assert rows == {one.name: spell(getattr(Plan(), one.name)) for one in dataclasses.fields(Plan)}
    words = {row[0]: re.findall(r"\w+", row[2]) for row in table("Plans")}
    assert {name: words[name] for name in WORDS} == {name: list(allowed) for name, allowed in WORDS.items()}
    texts = re.findall(r'plan="([^."]+)"', OPTIONS)
    assert len(texts) >= 2
    assert [str(Plan.parse(text)) for text in texts] == texts


NOT_FILES = {"train.py", "PACKAGE/MODULE.py", "PACKAGE/test_MODULE.py", ".py"}
"""Names of a reader's script, and forms of names."""
ELSEWHERE = re.compile(r"(\[[^\]]*\]\()?https?://[^\s)]*")
"""A link to another project, whose text may be the name of a file there."""


def named_files(text: str) -> set[str]:
    """Returns the names of Python files in a text, with as much of their folders as it says."""
    return set(re.findall(r"(?<![\w./*-])[\w./-]*\.py\b", ELSEWHERE.sub("", text))) - NOT_FILES


@pytest.mark.parametrize(
    "page", [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name
)
def test_files_that_pages_name_exist(page):
    folders = [ROOT / name for name in ("moreh_ap", "moreh", "scripts", "tests", "tutorials")]
    own = [path for folder in folders for path in folder.rglob("*.py")]
    paths = {f"/{path.relative_to(ROOT).as_posix()}" for path in own}
    names = named_files(page.read_text(encoding="utf-8"))
    assert [name for name in names if not any(path.endswith(f"/{name}") for path in paths)] == []


def test_a_name_of_a_file_that_moved_is_found():
    assert named_files("`a/b.py`, a -- c.py --> b, [`run.py`](https://example.com/run.py), `train.py`") == {
        "a/b.py",
        "c.py",
    }


@pytest.mark.parametrize("name", ["moreh_ap.errors", "moreh_ap.plan"])
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0
