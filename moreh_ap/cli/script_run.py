"""Runs a user's script until it calls a model for the first time.

Decides how a script is run and left. Must not know what the call is used for.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from moreh_ap import device
from moreh_ap.errors import OptionError
from moreh_ap.session.planning import first_call

Taken = TypeVar("Taken")


class _Left(BaseException):
    """Leaves the script; no `except Exception` of its own holds it back."""


def run_until_first_call(
    path: Path, arguments: list[str], take: Callable[[Any, Any], Taken], purpose: str = "verify"
) -> Taken:
    """Returns what `take(root, call)` made of the first call of a model on the accelerator.

    Args:
        path: The script.
        arguments: What it finds in `sys.argv` behind its name.
        take: Gets the model and (module, positional, keyword arguments). Its result must not refer to the accelerator,
            which is gone afterwards.
        purpose: What the call is for: the name of the command.

    Raises:
        OptionError: There is no such file, or it ends without calling a model on the accelerator.
        Exception: Whatever the script or `take` raises.
    """
    if not path.is_file():
        raise OptionError(f"there is no file {path}", "a script that uses the one line", f"moreh-ap {purpose} train.py")
    taken: list[Taken] = []

    def watch(root: Any, call: Any) -> None:
        if not taken:
            taken.append(take(root, call))
        raise _Left

    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0:0] = [str(path), *arguments], [str(path.resolve().parent)]
    ending, is_refused = "it ended", False
    try:
        with first_call.watching(watch):
            runpy.run_path(str(path), run_name="__main__")
    except _Left:
        return taken[0]
    except SystemExit as error:
        ending, is_refused = f"it exited with {error.code!r}", error.code == 2 and bool(arguments)
    finally:
        sys.argv, sys.path[:] = before
        device.disable()
    if taken:  # a bare `except:` of the script held it back
        return taken[0]
    if is_refused:  # what argparse exits with
        raise OptionError(
            f"{path} gives nothing to {purpose}: {ending}, as for an option that it does not have",
            f"after the script's name its own options alone; those of moreh-ap {purpose} before it",
            f"python {path.name} --help",
        )
    raise OptionError(
        f"{path} gives nothing to {purpose}: {ending} before a model was called on the accelerator",
        "a script with the one line whose model is on cuda",
        "torch.moreh.option.enable_advanced_parallelization()",
    )
