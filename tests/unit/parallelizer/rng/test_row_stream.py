"""Workers that draw for their items in turn, run one after another in this process."""

from __future__ import annotations

import torch
import torch.distributed as dist

from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.rng.row_stream import Round, RowStream
from moreh_ap.parallelizer.rng.shared_draws import Draw, Rows

CPU = torch.device("cpu")


def test_items_draw_what_one_device_draws(monkeypatch):
    lengths, states, found = [3, 5, 2, 4], {}, []

    def broadcast(state, group, group_src):
        states.setdefault(group_src, state.clone())
        state.copy_(states[group_src])

    monkeypatch.setattr(dist, "broadcast", broadcast)
    torch.manual_seed(0)
    wanted = [torch.randperm(length).tolist() for length in lengths]
    for rank, own in enumerate((lengths[:2], lengths[2:])):
        torch.manual_seed(0)
        # The other's turn that is still to come is left out: this process has run only the workers before.
        stream = RowStream(Axis(rank, rank + 1, None), [Round((7,))], CPU)
        assert stream.is_for_each_item(7) and stream.begins_round(7) and not stream.begins_round(8)
        stream.begin(len(own))
        for length in own:
            assert stream.goes_on(7)
            found.append(stream.draw_for_item(torch.randperm, (length,), {}).tolist())
        assert not stream.close()
    assert found == wanted


def test_a_round_that_is_not_through_is_ended(monkeypatch):
    turns = []
    monkeypatch.setattr(dist, "broadcast", lambda state, group, group_src: turns.append(group_src))
    stream = RowStream(Axis(0, 2, None), [Round((7, 8))], CPU)
    stream.begin(2)
    stream.draw_for_item(torch.rand, (2,), {})
    assert not stream.goes_on(7) and stream.close() and turns == [0, 1] and not stream.close()


def test_rows_of_unequal_numbers():
    draws = (Draw("bernoulli_", 2, Rows(0, (0, 1))),)
    torch.manual_seed(0)
    whole = torch.empty(5, 3).bernoulli_(0.5)
    torch.manual_seed(0)
    stream = RowStream(Axis(1, 2, None), [], CPU)
    own = stream.draw_rows(
        draws, torch.Tensor.bernoulli_, (torch.empty(2, 3), 0.5), {}, lambda own: torch.tensor([3, own])
    )
    assert torch.equal(own, whole[3:])
