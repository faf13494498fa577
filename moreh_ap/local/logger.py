"""The logger `moreh_ap`: where every line of the log goes, in the script's process and in the workers.

Decides what a line looks like on the screen and which lines are shown. Must not know what they say.

[Note: one line a run]
`NOTICE` is between INFO and WARNING. The line with the plan has it, so ``MOREH_LOG_LEVEL=notice`` shows one line
a run and what went wrong.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from moreh_ap.errors import OptionError

LEVEL_VARIABLE = "MOREH_LOG_LEVEL"
NOTICE = 25
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "notice": NOTICE,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
logging.addLevelName(NOTICE, "NOTICE")

SLOW_AT = "slow_at"
"""The attribute of a record that has the script's line of `say`."""

_logger = logging.getLogger("moreh_ap")


def shown(text: str, level: int = logging.INFO) -> str:
    """Returns `text` as it is shown."""
    return f"[{'warning' if level >= logging.WARNING else 'info'}] {text}"


class Screen(logging.Handler):
    """Prints lines to what is `sys.stdout` at that moment: a terminal, a notebook's cell, a test's capture."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints the line and its end at once, so that what other threads print does not come between them."""
        print(shown(record.getMessage(), record.levelno) + "\n", end="", flush=True)


def check_level(environment: Mapping[str, str]) -> int:
    """Returns the level that `MOREH_LOG_LEVEL` names, INFO where it is not set.

    Raises:
        OptionError: The variable has another value.
    """
    asked = environment.get(LEVEL_VARIABLE, "").strip().lower() or "info"
    if asked not in LEVELS:
        raise OptionError(
            f"environment: {LEVEL_VARIABLE}={environment[LEVEL_VARIABLE]!r}",
            ", ".join(LEVELS),
            f"{LEVEL_VARIABLE}=info",
        )
    return LEVELS[asked]


def say(text: str, level: int = logging.INFO, slow_at: str = "") -> None:
    """Logs a line.

    Args:
        text: The line.
        level: Its level.
        slow_at: Where it says why something is slower than it could be: the script's line at which that is.

    The first line gives the logger a handler that prints, unless the script has given it one of its own. The logger
    then does not hand lines on to the root logger, which would print them again.
    """
    _set_up()
    _logger.log(level, "%s", text, stacklevel=2, extra={SLOW_AT: slow_at})


def listen(handler: logging.Handler) -> None:
    """Has a handler get every line from INFO on, whatever the screen shows."""
    _set_up()
    _logger.addHandler(handler)


def forget(handler: logging.Handler) -> None:
    """Ends what `listen` began."""
    _logger.removeHandler(handler)


def _set_up() -> None:
    if not _logger.handlers:
        screen = Screen()
        screen.setLevel(check_level(os.environ))
        _logger.addHandler(screen)
        _logger.propagate = False
    if _logger.level == logging.NOTSET:
        _logger.setLevel(min(logging.INFO, check_level(os.environ)))
