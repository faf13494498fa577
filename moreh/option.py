"""`moreh.option`: the one line, under the name that scripts use. Decides nothing; see `moreh_ap.option`."""

from moreh_ap.option import enable_advanced_parallelization
from moreh_ap.settings import Options

__all__ = ["Options", "enable_advanced_parallelization"]
