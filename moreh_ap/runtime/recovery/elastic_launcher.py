"""The processes of a worker group of this machine that devices may join which were gone.

Must not know when these are tried: `missing_devices.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moreh_ap.runtime.launcher import Launcher, LaunchRequest
from moreh_ap.runtime.recovery.missing_devices import MissingDevices
from moreh_ap.runtime.recovery.other_devices import Joined


class ElasticLauncher(Launcher):
    """Worker processes.

    Args:
        request, is_stopping, agent_variables: As for `Launcher`.
        missing: Knows devices that were gone.
    """

    def __init__(
        self,
        request: LaunchRequest,
        is_stopping: Callable[[], bool],
        agent_variables: Mapping[str, str] | None = None,
        *,
        missing: MissingDevices,
    ) -> None:
        super().__init__(request, is_stopping, agent_variables)
        self._missing = missing

    def copied(self) -> Joined | None:
        return self._missing.back(self._request.num_workers)
