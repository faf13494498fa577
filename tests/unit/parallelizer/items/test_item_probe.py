"""Items of a batch tried together and apart by a single worker: what is learned of a forward, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.data.recompute import apply_recompute
from moreh_ap.parallelizer.items.item_probe import check_items
from moreh_ap.parallelizer.items.item_reduction import LARGEST, OWN, PER_ITEM, SUM
from moreh_ap.parallelizer.items.item_results import ITEMS, SHARE
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.trial.split_verdict import SplitVerdict
from moreh_ap.protocol.objects.batch_items import find_items


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class PadsAll(nn.Module):
    """Sequences of unequal length, padded to the longest; a mean over all that counts; a score for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, sequences):
        longest = max(len(one) for one in sequences)
        padded = sequences[0].new_zeros(len(sequences), longest, 3)
        for place, one in zip(padded, sequences):
            place[: len(one)] = one
        counts = padded.abs().sum(-1) > 0
        scores = self.layer(padded).squeeze(-1)
        total = (scores.square() * counts).sum() / counts.sum()
        return {"loss": total, "scores": [score[: len(one)] for score, one in zip(scores, sequences)]}


class MeansOfItems(PadsAll):
    def forward(self, sequences):
        return sum(F.mse_loss(self.layer(one), one[:, :1], reduction="sum") for one in sequences) / len(sequences)


class Block(nn.Module):
    """Divides by how many numbers of all items are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        x = self.layer(x)
        return x.tanh() * 100 / (x > 0).sum()


class Recomputed(PadsAll):
    """Blocks that compute their activations again, in which items meet."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        apply_recompute(self.blocks, "full")

    def forward(self, sequences):
        hidden = torch.cat(sequences)
        for block in self.blocks:
            hidden = block(hidden)
        return self.layer(hidden).square().sum()


class Nothing(PadsAll):
    def forward(self, sequences):
        return ()


class NoLoss(PadsAll):
    def forward(self, sequences):
        return 0.0 * sum(self.layer(one).sum() for one in sequences)


class Raises(PadsAll):
    def forward(self, sequences):
        raise ValueError("never runs")


def check(module: nn.Module, lengths=(4, 6, 3, 7, 5, 2), recomputes: bool = False) -> SplitVerdict:
    torch.manual_seed(0)
    items = find_items(([torch.randn(length, 3) for length in lengths],), {})
    assert items is not None and items.count == len(lengths)
    call = Call(module, "unsplit", torch.device("cpu"), axis=Axis(0, 1, None))
    return check_items(call, items, recomputes=recomputes)


def test_what_is_padded_counted_and_listed_is_learned():
    module = PadsAll()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    verdict = check(module)
    assert verdict.split and verdict.items is not None
    assert list(verdict.items.numbers.values()) == [(OWN, LARGEST, LARGEST), (SUM,)], "padded sizes, and counts"
    assert verdict.items.merge is not None
    assert [part.kind for part in verdict.items.merge.parts] == [SHARE, ITEMS]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_items_that_meet_in_blocks_that_are_computed_again():
    """The second run has the numbers of all items that the first one got."""
    verdict = check(Recomputed(), recomputes=True)
    assert verdict.split and verdict.items is not None
    assert list(verdict.items.numbers.values()).count((SUM,)) == 2


def test_a_mean_over_items_is_divided_by_all_of_them():
    verdict = check(MeansOfItems())
    assert verdict.split and verdict.items is not None
    assert (PER_ITEM,) in verdict.items.numbers.values()


@pytest.mark.parametrize(
    ("module", "reason", "could_run"),
    [
        (Nothing(), "returns nothing that could be compared", True),
        (NoLoss(), "the loss of a few rows is zero", True),
        (Raises(), "raised ValueError: never runs", False),
    ],
)
def test_what_shows_nothing_is_computed_whole(module, reason, could_run):
    verdict = check(module)
    assert not verdict.split and verdict.items is None
    assert reason in verdict.reason and verdict.could_run is could_run
    assert not verdict.faults
