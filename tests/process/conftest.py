"""The processes that all tests of the parallelizer share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from parallelizer_team import Team


@pytest.fixture(scope="session")
def team() -> Iterator[Team]:
    """Four processes for `team.run(world, job, ...)`."""
    team = Team()
    yield team
    team.close()
