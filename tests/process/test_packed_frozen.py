"""Frozen weights that are packed into bytes, without the library that packs them: numbers, and bytes that are held.

`tests/frameworks/test_qlora.py` has the library.
"""

from __future__ import annotations

import packed_models
import pytest
import torch

from moreh_ap.plan import Plan

pytestmark = pytest.mark.rotating  # one more plan each

BYTES = 4 * packed_models.WIDTH**2 // 2


@pytest.fixture(scope="module")
def alone(team):
    return team.run(1, packed_models.trained, plan="replicate=1")[0]


@pytest.mark.parametrize(
    "plan, held",
    [
        ("replicate=2", BYTES),
        ("shard=2", BYTES // 2),
        ("shard=2,micro_batches=2", BYTES // 2),
        ("shard=2,recompute=full", BYTES // 2),
        ("offload=all", BYTES),
        ("shard=2,micro_batches=2,offload=all", BYTES // 2),
    ],
)
def test_packed_bytes_are_replicated_or_sharded_and_train_adapters_as_on_one_device(team, alone, plan, held):
    for found in team.run(Plan.parse(plan).num_devices, packed_models.trained, plan=plan):
        assert found["held"] == held and alone["held"] == BYTES
        assert all(map(torch.equal, found["packed"], alone["packed"]))
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        torch.testing.assert_close(found["adapters"], alone["adapters"], rtol=1e-4, atol=1e-6)
