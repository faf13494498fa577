"""Whether a launcher for several processes has started the script.

Decides by which variables that is seen. `torchrun`, `accelerate launch` and `deepspeed` start as many copies of a
script as there are devices and tell each its number. With the one line each copy would take all devices and train the
whole batch, and all of them would write the same files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from moreh_ap.errors import UnsupportedError


def refuse_copies(environment: Mapping[str, str]) -> None:
    """Refuses a script that a launcher has started several times.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables

    Raises:
        UnsupportedError: This process is one of several copies.
    """
    size, number = environment.get("WORLD_SIZE", ""), environment.get("LOCAL_RANK")
    if number is None or not size.isdecimal() or int(size) < 2:
        return
    script = Path(sys.argv[0]).name if sys.argv and sys.argv[0].endswith(".py") else "train.py"
    raise UnsupportedError(
        f"A launcher has started {size} copies of this script (WORLD_SIZE={size}, LOCAL_RANK={number}). With the one "
        "line a script is one process, which uses all devices.",
        allowed="One process, without torchrun, accelerate launch or deepspeed",
        fix=f"python {script}",
        link="docs/ap/how-to-use.md#3-run-your-own-script",
    )
