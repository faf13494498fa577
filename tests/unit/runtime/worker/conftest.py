"""Process groups without other processes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moreh_ap.runtime.worker import probe_exchanges


@pytest.fixture(params=[2, 3, 4])
def world(request, monkeypatch):
    """Makes this process the first of so many, whose collectives return at once."""
    monkeypatch.setattr(probe_exchanges, "_ALTOGETHER_S", 0.05)
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()
