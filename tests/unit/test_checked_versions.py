"""The table of versions: one warning in an environment outside it; what else names versions agrees with it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from moreh_ap import checked_versions
from moreh_ap.accelerator import enabling
from moreh_ap.checked_versions import CHECKS, Versions, VersionWarning, find_check
from moreh_ap.option import enable_advanced_parallelization
from moreh_ap.toolkit import environment_checks
from moreh_ap.toolkit.findings import OK, WARNING

ROOT = Path(__file__).parents[2]
TESTED, OLDEST = CHECKS
OUTSIDE = Versions("3.13.1", "2.14.0+cu130", "5.23.0", "0.7.0")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Sets the versions that are found, and starts no accelerator."""
    monkeypatch.setattr(enabling, "enable", lambda options: None)
    checked_versions.warn_if_unchecked.cache_clear()
    yield lambda found: monkeypatch.setattr(checked_versions, "installed", lambda: found)
    checked_versions.warn_if_unchecked.cache_clear()


# -- the table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "check"),
    [
        (Versions("3.11.7", "2.13.0+cpu", "5.23.0", "0.7.0"), TESTED),
        (Versions("3.11.9", "2.13.1+cu130", "5.23.4", "0.7.0.post1"), TESTED),
        (Versions("3.12.3", "2.11.0", "5.17.0", "0.7.0"), OLDEST),
        (Versions("3.11.7", "2.13.0", "", ""), TESTED),
        (Versions("3.12.3", "2.13.0", "5.23.0", "0.7.0"), None),  # each was checked, and not together
        (Versions("3.11.7", "2.13.0", "5.17.0", "0.7.0"), None),
        (Versions("3.11.7", "2.12.1", "5.23.0", "0.7.0"), None),
        (Versions("3.1.1", "2.13.0", "5.23.0", "0.7.0"), None),
        (Versions("3.11.7", "2.13.0", "5.23.0", "0.7.1"), None),
        (Versions("3.11.7", "2.13.0.dev20260801", "5.23.0", "0.7.0"), None),
        (Versions("3.11.7", "2.13.0a0+git1234", "5.23.0", "0.7.0"), None),
        (Versions("3.11.7", "my build", "5.23.0", "0.7.0"), None),
        (OUTSIDE, None),
    ],
    ids=str,
)
def test_which_row_versions_belong_to(found, check):
    assert find_check(found) is check


def test_what_is_installed():
    found = checked_versions.installed()
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert (found.torch, found.transformers) == (metadata.version("torch"), metadata.version("transformers"))


def test_what_is_not_installed(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    found = checked_versions.installed()
    assert (found.torch, found.transformers, found.torchmonarch) == ("", "", "")
    assert str(found) == f"Python {found.python}"


def test_nothing_is_imported_to_ask():
    code = """
import sys
from moreh_ap import checked_versions as versions
assert versions.installed().transformers
print([name for name in ("torch", "transformers", "monarch") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


# -- the warning ---------------------------------------------------------------------------------------------------


def test_one_warning_at_the_line(environment):
    environment(OUTSIDE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        enable_advanced_parallelization()
        enable_advanced_parallelization()
    (warning,) = caught
    assert (warning.category, warning.filename, warning.lineno) == (VersionWarning, __file__, line)
    fact, checked, fix, link = str(warning.message).split("\n")
    assert fact.startswith("Python 3.13.1, torch 2.14.0+cu130, transformers 5.23.0, torchmonarch 0.7.0: ")
    assert checked.startswith("Checked: ") and all(f"{check.versions} ({check.how})" in checked for check in CHECKS)
    assert fix == 'Try: pip install "torch==2.13.*", and Python 3.11'
    assert link == "See: docs/limits.md#versions"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: str(check.versions))
def test_no_warning_in_the_table(environment, check):
    environment(check.versions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enable_advanced_parallelization()


def test_the_documented_filter_silences_it(environment):
    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`(warnings\.filterwarnings\(.*\))`", page)
    environment(OUTSIDE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eval(line, {"warnings": warnings})
        enable_advanced_parallelization()


@pytest.mark.parametrize(
    ("found", "fix"),
    [
        (Versions("3.11.1", "2.13.0", "5.30.0", ""), 'pip install "transformers==5.23.*"'),
        (Versions("3.10.1", "2.13.0", "5.23.0", "0.7.0"), "Python 3.11"),
        (Versions("3.11.1", "2.9.0", "4.57.0", "0.6.0"),
         'pip install "torch==2.13.*" "transformers==5.23.*" "torchmonarch==0.7.0.*"'),
    ],
    ids=str,
)  # fmt: skip
def test_what_to_do(found, fix):
    assert checked_versions.fix_of(found) == fix


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (Versions("3.11.7", "2.13.0", "5.23.0", "0.7.0"), OK),
        (Versions("3.12.3", "2.11.0", "5.17.0", "0.7.0"), OK),
        (OUTSIDE, WARNING),
    ],
    ids=str,
)
def test_the_doctor_says_it_too(environment, found, status):
    environment(found)
    finding = environment_checks._versions()
    assert finding.status == status
    assert bool(finding.fix) == (status != OK)


def test_the_doctor_warns_of_versions_with_which_nothing_ran(environment, monkeypatch):
    monkeypatch.setattr(checked_versions, "CHECKS", (TESTED, dataclasses.replace(OLDEST, was_run=False)))
    environment(Versions("3.12.3", "2.11.0", "5.17.0", "0.7.0"))
    finding = environment_checks._versions()
    assert finding.status == WARNING and finding.fix


# -- other places that name versions -------------------------------------------------------------------------------


def requirements(text: str) -> dict[str, Requirement]:
    return {one.name: one for one in map(Requirement, text)}


def test_pip_accepts_the_table_and_sets_the_oldest():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = requirements(re.findall(r'^  "(.*)",$', text.split("\ndependencies = [")[1].split("\n]")[0], re.MULTILINE))
    assert str(listed["torch"].specifier) == f">={OLDEST.versions.torch}"
    assert str(listed["transformers"].specifier) == f">={OLDEST.versions.transformers}"
    for check in CHECKS:
        assert str(listed["torchmonarch"].specifier) == f"=={check.versions.torchmonarch}"


def test_tests_run_with_the_first_row():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = requirements(line for line in lines if not line.startswith("#"))
    for name in ("torch", "transformers", "torchmonarch"):
        version = str(pinned[name].specifier).removeprefix("==")
        assert checked_versions._belongs_to(version, getattr(TESTED.versions, name)), name


@pytest.mark.parametrize(("page", "heading"), [("limits.md", "## Versions"), ("limits.ko.md", "## 버전 { #versions }")])
def test_the_page_has_the_table(page, heading):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = text.split(f"{heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", section, re.M)[2:]]
    assert [Versions(*row[:4]) for row in rows] == [check.versions for check in CHECKS]
    if page == "limits.md":
        assert [row[4] for row in rows] == [check.how for check in CHECKS]
    assert re.findall(r"torch (2\.\d+).*?transformers (5\.\d+)", text)[0] == (
        TESTED.versions.torch, TESTED.versions.transformers)  # fmt: skip
