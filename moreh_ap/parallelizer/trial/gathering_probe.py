"""A few rows of a batch run together, and shared among the workers, who gather them where they meet.

Decides how that is tried where a forward compares rows with each other: contrastive losses, balanced experts,
statistics that a model takes itself. Must not know what follows from it (`split_check.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from moreh_ap.parallelizer.call.forward import EagerForward
from moreh_ap.parallelizer.call.placement import OwnDevice
from moreh_ap.parallelizer.data.row_gathering import Gathering, GatheringReduction
from moreh_ap.parallelizer.rng.policy import RandomPolicy
from moreh_ap.parallelizer.trial.dry_run import NoDropout
from moreh_ap.parallelizer.trial.joined_probe import JoinedProbe
from moreh_ap.parallelizer.trial.lockstep import Lockstep
from moreh_ap.parallelizer.trial.recorded_calls import NumberRecorder
from moreh_ap.protocol.batch import row_range


class GatheringProbe(JoinedProbe):
    """Learns where rows meet, then runs as `JoinedProbe` does."""

    _least_rounding = 0.0

    def compare_outputs(self) -> None:
        number = len(self._chosen)
        _, first = row_range(0, 2, number)
        fewer = NumberRecorder(self.call.device)
        self._forward(first, fewer)
        lockstep = Lockstep(
            self.call.device,
            rows=(first, number - first),
            dims=self.dims,
            fewer=(first, fewer.calls),
            tolerance=self._tolerance,
        )
        self._forward(number, lockstep)
        self.steps = tuple(lockstep.steps)
        super().compare_outputs()

    def _forward(self, number: int, mode: OwnDevice) -> None:
        """Runs the first of the chosen rows under a mode."""
        args, kwargs = self._arguments(self._chosen[:number])
        with self._from_the_same_state(), NoDropout():
            EagerForward(replace(self.call, random=RandomPolicy()), args, kwargs, reduction=mode)

    def _reduction(self, mark: Callable[[], int] | None) -> GatheringReduction:
        gathering = Gathering(self.steps, tuple(self.dims), len(self._chosen))
        return GatheringReduction(self.call.device, axis=self.call.axis, gathering=gathering, mark=mark)

    def _check_denominators(self, common: Sequence[Tensor], apart: Sequence[Sequence[Tensor]]) -> None:
        """Means of what every worker has are no sites on workers; the results are compared in any case."""
