"""All rows of a batch run together, and shared among workers that have whole parts of what normalisations cut it into.

Decides how that is tried: parts are made of many rows, so that a few do not show them. Must not know what follows from
it (`trial/split_check.py`).
"""

from __future__ import annotations

from moreh_ap.parallelizer.row_dims.placed_probe import PlacedJoinedProbe
from moreh_ap.parallelizer.trial.dry_run import Refused

NOT_WHOLE = "batch normalisation takes the statistics of parts of the batch, which workers do not have whole"


class PartsProbe(PlacedJoinedProbe):
    """As its base with all rows of the batch. See [Note: one part after the other] in `batch_parts.py`."""

    def _choose_rows(self) -> list[int]:
        super()._choose_rows()  # which notes where they lie
        return list(range(self.rows))

    def compare_outputs(self) -> None:
        parts = self.find_parts()
        if not parts or self.rows % self.call.axis.size:
            raise Refused(NOT_WHOLE)
        self.parts = parts
        super().compare_outputs()
