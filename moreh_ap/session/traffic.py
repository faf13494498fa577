"""How many bytes of large tensors travel between the workers and the script in a step, and a word if they are many.

Decides when that is worth a warning. Must not know what the tensors are.
"""

from __future__ import annotations

from moreh_ap.session import script_line

_MANY_BYTES = 64 << 20


class SlowPathWarning(UserWarning):
    """A script moves so many bytes through its own process that this, and not the devices, decides its speed."""


class Traffic:
    """Counts the bytes of one step.

    Attributes:
        step: Number of the present step; sending an optimizer's step, or a forward of an evaluation, counts it up.
    """

    def __init__(self) -> None:
        self.step = 0
        self._counted_step = 0
        self._bytes = 0
        self._has_warned = False

    def moved(self, num_bytes: int) -> None:
        """Bytes of a tensor went to the script, or came from it to the workers."""
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
