"""A few rows of a batch run together on each worker, and shared among the workers with statistics of all of them.

Decides how that is tried where batch normalisation makes rows depend on each other: as a real split call, whose
workers exchange statistics. Must not know what follows from it (`split_check.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from moreh_ap.parallelizer.call.forward import EagerForward
from moreh_ap.parallelizer.call.pipelined_forward import PipelinedPass
from moreh_ap.parallelizer.data.batch_statistics import JoinedReduction
from moreh_ap.parallelizer.trial.probe import Probe, Result
from moreh_ap.protocol.pytree import pickle_treespec, unpickle_treespec

ROWS_A_WORKER = 2
"""Rows that each worker runs, if the batch has so many: of two values a channel, normalisation leaves the signs."""


class JoinedProbe(Probe):
    """The common run, and one run on each worker of its share of the rows. A collective; see `Probe`."""

    is_joined = True
    _fewest_rows = 2
    _noise = 0.5
    """A bias in front of batch normalisation has a gradient of zero, which is the difference of large sums."""

    def _choose_rows(self) -> list[int]:
        number = self.call.axis.size * min(ROWS_A_WORKER, self._rows // self.call.axis.size)
        return [place * self._rows // number for place in range(number)]

    def _run_apart(self, denominators: Sequence[Tensor]) -> tuple[list[Result], list[Sequence[Tensor]]]:
        call, axis = self.call, self.call.axis
        mark = replace(call.random, draws=self.draws).fingerprint()
        reduction = self._reduction(mark)
        each = len(self._chosen) // axis.size
        run = self._run(self._chosen[axis.rank * each : (axis.rank + 1) * each], reduction, mode="split")
        self._singles = [run]
        leaves = tree_map_only(Tensor, lambda leaf: leaf.detach().cpu(), list(run.outputs))
        counted = [one.cpu() for one in reduction.local_denominators]
        found: list[Any] = [None] * axis.size
        dist.all_gather_object(found, (pickle_treespec(run.treespec), leaves, counted), group=axis.group)
        results = [
            (unpickle_treespec(spec), tree_map_only(Tensor, lambda leaf: leaf.to(call.device), leaves))
            for spec, leaves, _ in found
        ]
        return results, [counted for _, _, counted in found]

    def _reduction(self, mark: Callable[[], int] | None) -> JoinedReduction:
        call = self.call
        return JoinedReduction(call.device, axis=call.axis, counts=call.counts, mark=mark)

    def _go_back(self, run: EagerForward | PipelinedPass, gradients: Sequence[Tensor | None]) -> None:
        run.backward(gradients)

    def _backward_apart(self) -> None:
        self._go_back(self._singles[0], self._share_of(self.call.axis.rank, self.call.axis.size))
