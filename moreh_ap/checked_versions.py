"""The versions of Python and of other libraries with which this package was checked, and how each was checked.

Decides which environments are in the table and how a script in another one is warned. `pyproject.toml` says what may be
installed, which is more: an environment outside the table is used as it is, after one warning. Must not import what it
asks about.
"""

from __future__ import annotations

import functools
import sys
import warnings
from dataclasses import dataclass, fields
from importlib import metadata

from packaging.version import InvalidVersion, Version

LINK = "docs/limits.md#versions"


class VersionWarning(UserWarning):
    """The versions of Python, torch, transformers and torchmonarch here were not checked together."""


@dataclass(frozen=True)
class Versions:
    """A version of each; "" where a library is not installed. In the table, the first parts of one: "2.13"."""

    python: str
    torch: str
    transformers: str
    torchmonarch: str

    def __str__(self) -> str:
        names = {"python": "Python"}
        found = {names.get(one.name, one.name): getattr(self, one.name) for one in fields(self)}
        return ", ".join(f"{name} {version}" for name, version in found.items() if version)


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        versions: What was checked together.
        was_run: Whether anything ran with these versions.
        how: What was done, for users to read.
    """

    versions: Versions
    was_run: bool
    how: str


CHECKS = (
    Check(Versions("3.11", "2.13", "5.23", "0.7.0"), True, "every test ran, on CPU workers"),
    Check(
        Versions("3.12", "2.11", "5.17", "0.7.0"),
        True,
        "the tests for GPUs ran, on one GPU; the names of torch that are used were compared with its wheel",
    ),
)
"""The second row has the oldest versions that `pyproject.toml` accepts, and the Python that the wheel is for.
`tests/unit/test_torch_names.py` compares the names."""


def installed() -> Versions:
    """Returns the versions in this environment. Imports none of the libraries."""
    python = ".".join(map(str, sys.version_info[:3]))
    return Versions(python, *map(_version_of, ("torch", "transformers", "torchmonarch")))


def find_check(found: Versions) -> Check | None:
    """Returns the row of the table that versions belong to. What is not installed belongs to any row."""
    for check in CHECKS:
        pairs = ((getattr(found, one.name), getattr(check.versions, one.name)) for one in fields(Versions))
        if all(not version or _belongs_to(version, row) for version, row in pairs):
            return check
    return None


@functools.cache
def warn_if_unchecked(stacklevel: int = 2) -> None:
    """Warns, once in a process, if the versions here are in no row of the table.

    Args:
        stacklevel: Which line the warning names, counted as `warnings.warn` does; 2 is the caller's.
    """
    found = installed()
    if find_check(found) is None:
        warnings.warn(describe_unchecked(found), VersionWarning, stacklevel=stacklevel)


def describe_unchecked(found: Versions) -> str:
    """Returns what versions outside the table mean, in four parts as errors have them."""
    return "\n".join(
        [
            f"{found}: moreh_ap was not checked with these versions together",
            "Checked: " + "; ".join(f"{check.versions} ({check.how})" for check in CHECKS),
            f"Try: {fix_of(found)}",
            f"See: {LINK}",
        ]
    )


def fix_of(found: Versions) -> str:
    """Returns what brings an environment into the first row of the table, a line to paste where pip can do it."""
    row = CHECKS[0].versions
    wrong = [name for name in ("torch", "transformers", "torchmonarch")
             if getattr(found, name) and not _belongs_to(getattr(found, name), getattr(row, name))]  # fmt: skip
    wanted = " ".join(f'"{name}=={getattr(row, name)}.*"' for name in wrong)
    parts = [f"pip install {wanted}"] if wrong else []
    if not _belongs_to(found.python, row.python):
        parts.append(f"Python {row.python}")
    return ", and ".join(parts)


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _belongs_to(version: str, row: str) -> bool:
    """Returns whether a version begins with the numbers of a row. A pre-release is not yet the version it leads to."""
    try:
        given, checked = Version(version), Version(row)
    except InvalidVersion:  # a source build may have any text for a version
        return False
    return given.release[: len(checked.release)] == checked.release and not given.is_prerelease
