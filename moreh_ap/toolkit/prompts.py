"""Numbered lists, and the question which number.

Decides how a list reads, what becomes of an answer that is none, and how a tool ends without an answer. Must not know
what is chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

from moreh_ap.errors import MorehError, OptionError

Found = TypeVar("Found")

INTERRUPTED_STATUS = 130
"""Exit status after Ctrl-C. Source: bash(1), exit status: 128 and the signal's number."""


def numbered(models: Mapping[str, int], current: str, most_devices: int) -> str:
    """Returns the list of models, the current one marked, and those that are too large said to be.

    Args:
        models: Names with numbers of devices.
        current: Name of the current one.
        most_devices: So many the machine can have.
    """
    lines = []
    for number, (name, count) in enumerate(models.items(), 1):
        mark = "  *" if name == current else f"  (needs {count} devices)" if count > most_devices else ""
        lines.append(f"{number}. {name}{mark}")
    return "\n".join(lines)


def ask(first: int, last: int, find: Callable[[str], Found]) -> Found | None:
    """Returns what `find` makes of an answer, None if the answer is ``q``.

    Asks again as long as `find` raises an `OptionError`, whose first two lines are shown.

    Args:
        first: Smallest number of the list.
        last: Largest number of the list.
        find: Gets the answer.

    Raises:
        EOFError: Standard input is closed or at its end.
    """
    while True:
        answer = _answer(f"Selection ({first}-{last}, q, Q): ")
        if answer in ("q", "Q"):
            return None
        if not answer:
            continue
        try:
            return find(answer)
        except OptionError as error:
            print(f"{error.fact}\nAllowed: {error.allowed}")


def agree(question: str) -> bool:
    """Returns whether the answer is yes.

    Raises:
        EOFError: Standard input is closed or at its end.
    """
    return _answer(f"{question} [y/N] ").lower() in ("y", "yes")


def _answer(question: str) -> str:
    try:
        answer = input(question).strip()
        if not sys.stdin.isatty():
            print(answer)  # a terminal shows what is typed; a log of piped answers should read alike
        return answer
    except (EOFError, RuntimeError) as error:  # RuntimeError: the process was started without a standard input
        print()
        raise EOFError("there is no more input") from error


def run_tool(tool: Callable[[], int]) -> int:
    """Returns the exit status of a tool: 2 after an error of ours, which is printed, 1 where an answer was needed and
    there was none, and 130 after Ctrl-C."""
    try:
        return tool()
    except EOFError as error:
        print(f"Nothing was done: {error}.", file=sys.stderr)
        return 1
    except MorehError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return INTERRUPTED_STATUS
