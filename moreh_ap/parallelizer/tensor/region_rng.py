"""Random numbers of ranks that share one seed: the same where they compute the same, different where they do not.

Decides which stream of random numbers is drawn from. Must not know layers.

[Note: random numbers of a region]
Outside of split regions every rank computes the same and must draw the same: all start from one seed and draw the same
shapes in the same order. Inside, ranks have different heads (with sequence parallelism: different tokens) and must draw
different masks. So a region that drops something draws one number from the common stream, seeds a stream of this rank's
own with that number plus the rank, and returns to the common one at its end. Recomputation in backward does the same
again, because the number comes from the common stream.
"""

from __future__ import annotations

import torch
from torch import Tensor


class OwnStream:
    """This rank's own stream, drawn from as soon as this is made, with the common one put aside.

    Args:
        rank: This worker's place on the tensor axis.
        device: Where the region computes.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        number = int(torch.randint(2**62, (), generator=torch.default_generator))
        self._device = device
        self._aside = self._state()
        torch.default_generator.manual_seed(number + rank)
        if device.type == "cuda":
            torch.cuda.manual_seed(number + rank)

    def swap(self) -> None:
        """Goes on with the stream that was put aside, and puts the present one aside."""
        aside, self._aside = self._aside, self._state()
        torch.default_generator.set_state(aside[0])
        if aside[1] is not None:
            torch.cuda.set_rng_state(aside[1], self._device)

    def _state(self) -> tuple[Tensor, Tensor | None]:
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.default_generator.get_state(), on_device
