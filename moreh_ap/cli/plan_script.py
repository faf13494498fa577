"""What `moreh-ap plan train.py` runs in a process of its own (`plan_process.py`): the script, up to its first call.

Decides which message a user gets if the script fails. Must not know how the plan is found.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moreh_ap.cli import plan_command
from moreh_ap.cli.script_run import run_until_first_call
from moreh_ap.dry import dry_accelerator
from moreh_ap.dry.dry_accelerator import DryPlan, FirstCall
from moreh_ap.dry.side_effects import Asked, SideEffects
from moreh_ap.errors import MorehError, OptionError
from moreh_ap.reporting.run_record import MASK

if TYPE_CHECKING:
    from moreh_ap.planner.cost.hardware import Cluster

_FAILED = 2  # the exit status, as of `main`
LINK = "docs/dry-run.md#errors"
_SECRET_NAME = re.compile("TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_SECRET = re.compile(r"\b(hf|sk|ghp|gho|github_pat|xox[abp]|AKIA)[-_]?[A-Za-z0-9_-]{12,}")
_LEAST_SECRET = 6  # characters; shorter values are words that stand in many messages

Found = tuple[FirstCall, "DryPlan | MorehError"]


def planned(
    script: Path, arguments: list[str], cluster: Cluster | None, *, with_weights: bool, shows_output: bool
) -> tuple[FirstCall, DryPlan, list[str]]:
    """Returns a script's first call, its plan, and what the user has to know of the script.

    Args:
        script: The file.
        arguments: Those of the script.
        cluster: The devices; None: those of this machine.
        with_weights: Whether parameters have their values.
        shows_output: Whether what the script prints is shown; it may be a secret.

    Raises:
        MorehError: The script does not come to a call, or no plan fits.
    """
    effects = SideEffects()

    def take(root: Any, call: Any) -> Found:
        first = dry_accelerator.note_first_call(root, call)
        try:
            return first, dry_accelerator.plan_of(first)
        except MorehError as error:  # not raised here: the script might catch it
            return first, error

    with contextlib.nullcontext() if shows_output else _unheard():
        try:
            with (
                effects.noting(),
                dry_accelerator.dry(cluster, effects.note_left_out, with_weights=with_weights) as made,
            ):
                first, plan = run_until_first_call(script, arguments, take, "plan")
        except MorehError:
            raise
        except Asked as asked:
            raise OptionError(
                f"{script} asks a question ({_place(asked, script)}), and a dry run cannot answer it",
                "a script that takes its settings as arguments, after its name",
                f"moreh-ap plan --devices 8xH100 {script.name} --yes",
                LINK,
            ) from None
        except Exception as error:  # of any class: it is the script's own
            said = masked(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", arguments)
            if not made:
                raise OptionError(
                    f"{script} ended with an error ({_place(error, script)}) before it called the one line: {said}",
                    *_before_the_line(error, script),
                    LINK,
                ) from None
            raise OptionError(
                f"{script} ended with an error ({_place(error, script)}) before a model was called: {said}",
                "a script that runs by itself; its own options come after its name, those of moreh-ap before it",
                f"moreh-ap plan --show-output --devices 8xH100 {script.name}",
                LINK,
            ) from None
    if isinstance(plan, MorehError):
        raise plan
    return first, plan, [*plan.notes, *effects.sentences()]


def _before_the_line(error: Exception, script: Path) -> tuple[str, str]:
    """Returns what is allowed and what to try where a script fails before the one line."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return "a script whose imports are installed here", f"pip install {error.name.partition('.')[0]}"
    if re.search("cuda|gpu|nvidia", str(error), re.IGNORECASE):
        one_line = "torch.moreh.option.enable_advanced_parallelization()"
        return 'a script that calls the one line before it uses "cuda"', one_line
    return "a script that comes to the one line without an error", f"python {script.name}"


def masked(text: str, arguments: list[str]) -> str:
    """Returns a text without values that may be secrets: of variables and arguments with such names, and known forms.

    Example:
        >>> masked("401 for hf_abcdefghijklmnop", [])
        '401 for (set)'
    """
    pairs = [*os.environ.items(), *itertools.pairwise(arguments)]
    pairs += [(name, value) for name, _, value in (argument.partition("=") for argument in arguments)]
    for name, value in pairs:
        if _SECRET_NAME.search(name) and len(value) >= _LEAST_SECRET:
            text = text.replace(value, MASK)
    return _SECRET.sub(MASK, text)


def _place(error: BaseException, script: Path) -> str:
    """Returns the last line of the script in an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if os.path.basename(frame.filename) == script.name]
    return f"line {lines[-1]}" if lines else "at its start"


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Drops what is written on the file descriptors 1 and 2 inside."""
    with tempfile.TemporaryFile() as dropped:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = os.dup(1), os.dup(2)
        for descriptor in (1, 2):
            os.dup2(dropped.fileno(), descriptor)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, before in zip((1, 2), kept):
                os.dup2(before, descriptor)
                os.close(before)


def main(options: str, script: str, *arguments: str) -> int:
    """Shows the plan of a script and returns the exit status.

    Args:
        options: Values of the command's arguments, as JSON says them.
        script: The file.
        arguments: Those of the script.

    Raises:
        MorehError: The script does not come to a call, or no plan fits.
    """
    asked = argparse.Namespace(**json.loads(options))
    named = asked.devices is not None or asked.hardware is not None
    cluster = plan_command.cluster_of(asked) if named else None
    first, plan, notes = planned(
        Path(script), list(arguments), cluster, with_weights=asked.with_weights, shows_output=asked.show_output
    )
    said = [*notes, *plan_command.too_long(first.shape, first.question.profile.sequence_length)]
    plan_command.show(asked, plan.choice.ranking, plan.fewer, said)
    return 0


if __name__ == "__main__":
    status = _FAILED
    try:
        status = main(*sys.argv[1:])
    except MorehError as error:
        print(error, file=sys.stderr)
    except BaseException:  # of any class: nothing that the script has registered may run behind it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
