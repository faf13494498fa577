"""Results of the matrix of families and plans, in a JSON file from which `docs/reference/exactness.md` is made.

Decides what is kept of a cell. Must not know what is done with it.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES
from matrix_plans import Cell, all_cells
from matrix_run import Difference

from moreh_ap.session.planning.first_call import family_of


class Results:
    """Collects verdicts and writes them to `file`: cells that did not run now stay as they were there.

    Args:
        file: The JSON file; None collects for nobody.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._entries: dict[str, dict[str, Any]] = {}

    def add(
        self, cell: Cell, verdict: str, *, difference: Difference | None = None, note: str = "", seconds: float
    ) -> None:
        """Keeps the verdict ("exact", "refused", "wrong", "failed") on a cell, and what explains it."""
        import transformers

        self._entries[str(cell)] = {
            "family": cell.family,
            "class": _class_of(cell.family),
            "plan": cell.plan,
            "text": cell.text,
            "verdict": verdict,
            **({} if difference is None else _rounded(asdict(difference))),
            "note": note,
            "seconds": round(seconds, 2),
            "date": datetime.now(timezone.utc).date().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def write(self) -> None:
        """Writes the file, one line a cell, in the order of the matrix."""
        if self._file is None or not self._entries:
            return
        kept = {}
        if self._file.exists():
            kept = {f"{entry['plan']}-{entry['family']}": entry for entry in json.loads(self._file.read_text())}
        kept |= self._entries
        known = [kept[str(cell)] for cell in all_cells() if str(cell) in kept]
        lines = [json.dumps(entry, ensure_ascii=False) for entry in known]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text("[\n" + ",\n".join(lines) + "\n]\n")


@cache
def _class_of(family: str) -> str:
    """The name under which the planner knows a family."""
    return family_of(FAMILIES[family].build())


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.1e}") if isinstance(value, float) else value for key, value in values.items()}
