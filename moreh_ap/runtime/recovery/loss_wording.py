"""How losses are worded in errors and in the log. Must not know what is done about them."""

from __future__ import annotations

from moreh_ap.errors import WorkerLostError


def in_short(lost: WorkerLostError) -> str:
    """Returns who was lost and how, without its last output."""
    return as_sentence(lost.fact.partition(chr(10))[0].removesuffix(" Its last output:"))


def steps_were(number: int) -> str:
    return f"{number} steps were" if number != 1 else "1 step was"


def of_error(error: BaseException | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def as_sentence(text: str) -> str:
    """Returns a text with a full stop behind it."""
    return text if text.endswith(".") else f"{text}."


def before_first_copy(lost: WorkerLostError) -> WorkerLostError:
    """Returns the error of a loss before there is a copy of what workers hold: it says what would have helped."""
    instead = "MOREH_RECOVERY=memory, with which others take over at any step; by default, but for a gap before a copy"
    error = WorkerLostError(lost.fact, lost.allowed or instead, lost.fix, lost.link)
    error.__cause__ = lost.__cause__
    return error
