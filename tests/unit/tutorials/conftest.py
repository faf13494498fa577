"""Makes the files of `scripts/`, `scripts/baselines/` and `tutorials/` importable, as they are when they are run."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "scripts/baselines", "tutorials")]
