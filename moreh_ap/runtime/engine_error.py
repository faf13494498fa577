"""The error of a message that the engine lost; knows nothing of the engine, whose import loads Monarch."""

from __future__ import annotations


class EngineError(Exception):
    """The engine could not deliver a message or its answer: a process is gone."""

    @property
    def is_time_out(self) -> bool:
        """Whether a process has not started in the 30 s that Monarch gives it. Given more, it loses answers."""
        return "Timeout" in str(self)
