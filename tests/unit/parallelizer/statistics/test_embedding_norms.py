"""Rows of an embedding that are renormalised because another worker looks them up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.statistics.embedding_norms import with_norms_of_batch


@pytest.mark.parametrize("func", [F.embedding, F.embedding_bag])
def test_what_another_worker_looks_up_is_renormalised_here_too(monkeypatch, func):
    def with_row_three(seen, op, group):
        assert op is dist.ReduceOp.MAX and seen.tolist() == [0, 1, 0, 0, 1]
        seen[3] = 1

    monkeypatch.setattr(dist, "all_reduce", with_row_three)
    weight = torch.full((5, 4), 2.0)
    call = with_norms_of_batch(func, (torch.tensor([[1, 4]]), weight), {"max_norm": 1.0}, Axis(0, 2, None))
    assert call.arguments["max_norm"] is None
    torch.testing.assert_close(weight.norm(dim=1), torch.tensor([4.0, 1.0, 4.0, 1.0, 1.0]))
    assert func(*call.args, **call.kwargs).shape[0] == 1
