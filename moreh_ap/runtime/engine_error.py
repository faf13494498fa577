"""The error of a message that the engine lost, and the error that callers get for a start that ended in it.

Knows nothing of the engine, whose import loads Monarch.
"""

from __future__ import annotations

from moreh_ap.errors import MeshStartError


class EngineError(Exception):
    """The engine could not deliver a message or its answer: a process is gone."""

    @property
    def is_time_out(self) -> bool:
        """Whether a process has not started in the 30 s that Monarch gives it. Given more, it loses answers."""
        return "Timeout" in str(self)


def start_error(error: EngineError) -> MeshStartError:
    """Makes the error for worker processes that the engine could not start."""
    if error.is_time_out:
        return MeshStartError(
            "The worker processes were not ready in the 30 s that the engine gives them: this machine is busy, or "
            "reads PyTorch from a slow disk for the first time.",
            fix="run the script again",
        )
    return MeshStartError(
        f"A worker process ended while it was starting: {error}",
        fix="python -c 'import torch, monarch.actor'  # does the installation work?",
    )


def was_too_slow(error: BaseException | None) -> bool:
    """Returns whether processes could not be started because the engine did not wait for them any longer."""
    while error is not None:
        if isinstance(error, EngineError) and error.is_time_out:
            return True
        error = error.__cause__
    return False
