"""Which accelerator is in force in this process: what the one line makes, and keeps.

Decides what a second call of the line means, and that workers begin before the rest of this package is imported (see
[Note: ahead] in `worker_starts`). Must not know what an accelerator is made of.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable

from moreh_ap import device
from moreh_ap.accelerator.launchers import refuse_copies
from moreh_ap.accelerator.worker_starts import WorkerStarts
from moreh_ap.device import AcceleratorInForce
from moreh_ap.errors import OptionError
from moreh_ap.local import garbage_at_start, logger
from moreh_ap.plan import Plan
from moreh_ap.runtime.worker_environment import WORKER_VARIABLE
from moreh_ap.settings import Options, unread_variables


def make_accelerator(options: Options) -> AcceleratorInForce:
    """Returns an `Accelerator`, whose workers are starting.

    Raises:
        UnsupportedError: A launcher has started several copies of the script.
        Exception: those of `WorkerStarts` and `Accelerator`.
    """
    refuse_copies(os.environ)
    starts = WorkerStarts(options)
    for sentence in unread_variables(os.environ):
        logger.say(sentence, logging.WARNING)
    garbage_at_start.leave_out_older_objects()
    try:
        from moreh_ap.accelerator.redirection import Accelerator

        return Accelerator(options, starts)
    except BaseException:  # Ctrl-C, too
        garbage_at_start.include_older_objects()
        starts.close()
        raise


class _Makes:
    """What the one line makes: an `Accelerator`, unless a dry run says otherwise."""

    make: Callable[[Options], AcceleratorInForce] = staticmethod(make_accelerator)


MAKES = _Makes()


def _differing(options: Options, others: Options) -> str:
    """Returns the options that others have with another value, as arguments of the one line; hosts are never shown."""
    names = [one.name for one in dataclasses.fields(options) if one.compare and one.repr]
    values = {name: getattr(options, name) for name in names if getattr(options, name) != getattr(others, name)}
    texts = {name: str(value) if isinstance(value, Plan) else value for name, value in values.items()}
    return ", ".join(f"{name}={text!r}" for name, text in texts.items())


def enable(options: Options) -> None:
    """Make "cuda" mean an accelerator with these options; with the same options again, nothing happens.

    Nor does anything happen in a worker, which imports a module of the script that has the line. An accelerator whose
    workers are lost is replaced by another one; what the lost workers had stays lost.

    Raises:
        OptionError: If an accelerator with other options is in use already.
    """
    if WORKER_VARIABLE in os.environ:
        return
    in_force = device.current()
    if in_force is not None and in_force.has_ended():
        device.disable()
    elif in_force is not None:
        if in_force.options == options:
            return
        if in_force.options.hosts != options.hosts:
            raise OptionError(
                "The accelerator has other hosts already.",
                allowed="the hosts of the first call",
                fix="torch.moreh.option.enable_advanced_parallelization(hosts=...)  # once, before anything else",
            )
        if in_force.in_use():
            raise OptionError(
                f"The accelerator is in use with {_differing(in_force.options, options)}; this call asks for "
                f"{_differing(options, in_force.options)}.",
                allowed="One call, or further calls with the same arguments, before the accelerator is used.",
                fix="torch.moreh.option.enable_advanced_parallelization(...)  # once, before the first model call",
            )
        device.disable()
    device.put_in_force(MAKES.make(options))
