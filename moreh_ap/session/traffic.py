"""Counts the bytes of large tensors between workers and script in a step, and warns if they are many.

Decides when a warning is due. Must not know what the tensors are.
"""

from __future__ import annotations

from moreh_ap.session import script_line

_MANY_BYTES = 64 << 20


class SlowPathWarning(UserWarning):
    """The script moves so many bytes through its own process that this limits its speed, not the devices."""


class Traffic:
    """Counts the bytes of one step.

    Attributes:
        step: Number of the present step; an optimizer's step, or a forward in evaluation, increments it.
    """

    def __init__(self) -> None:
        self.step = 0
        self._counted_step = 0
        self._bytes = 0
        self._has_warned = False

    def moved(self, num_bytes: int) -> None:
        """Counts bytes of a tensor that went from the workers to the script, or back."""
        if self._counted_step != self.step:
            self._counted_step, self._bytes = self.step, 0
        self._bytes += num_bytes
        if self._bytes > _MANY_BYTES and not self._has_warned:
            self._has_warned = True
            _warn(self._bytes)


def _warn(num_bytes: int) -> None:
    script_line.warn(
        f"{num_bytes / 2**20:.0f} MB of tensors went through this process in one step: what is computed here is not "
        "spread over the devices. Compute it inside a module, or with operations that run on the devices (losses of "
        "torch.nn.functional, softmax, gather, sums and means over dims other than the first); do not print or index "
        "large outputs in every step.",
        SlowPathWarning,
    )
