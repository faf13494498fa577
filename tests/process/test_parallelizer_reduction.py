"""Shares of a mean add up to the mean, whatever the slices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parallelizer_models import make_batch, make_model
from torch import Tensor, nn

from moreh_ap.errors import ExactnessError
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.loss.mean_rules import MeanRules
from moreh_ap.parallelizer.loss.meta_reduction import MetaReduction

CPU = torch.device("cpu")
ROWS, CLASSES = 7, 5
SLICES = [slice(0, 3), slice(3, 4), slice(4, 7)]  # the second has no valid target

random = torch.Generator().manual_seed(0)
SCORES = torch.randn(ROWS, CLASSES, generator=random)
LABELS = torch.tensor([1, -100, 4, -100, 0, 2, 2])
OTHER = torch.rand(ROWS, CLASSES, generator=random)
SIGNS = torch.tensor([1.0, -1, 1, 1, -1, -1, 1])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.1])

TARGET_LENGTHS = torch.tensor([1, 2, 3, 0, 2, 1, 3])


def _ctc(x: Tensor, rows: slice, lengths: Callable[[Tensor], object] = lambda one: one) -> Tensor:
    """The loss of six steps a row; targets of a row have lengths of their own, one has none."""
    scores_TBC = torch.stack([x * factor for factor in (1.0, 2.0, -1.0, 0.5, 3.0, 1.5)]).log_softmax(-1)
    steps, targets = torch.full((len(x),), 6), torch.tensor([[1, 2, 3]]).expand(len(x), 3)
    given = TARGET_LENGTHS[rows]
    return F.ctc_loss(scores_TBC, targets, lengths(steps), lengths(given), reduction="mean")


LOSSES: dict[str, Callable[[Tensor, slice], Tensor]] = {
    "cross entropy": lambda x, s: F.cross_entropy(x, LABELS[s]),
    "cross entropy, module": lambda x, s: nn.CrossEntropyLoss(ignore_index=2)(x, LABELS[s].clamp(min=0)),
    "cross entropy, class weights": lambda x, s: F.cross_entropy(x, LABELS[s], weight=WEIGHT),
    "cross entropy, smoothed": lambda x, s: F.cross_entropy(x, LABELS[s], WEIGHT, label_smoothing=0.2),
    "cross entropy, probabilities": lambda x, s: F.cross_entropy(x, OTHER[s].softmax(1), WEIGHT),
    "cross entropy, images": lambda x, s: F.cross_entropy(x[:, :, None], LABELS[s][:, None]),
    "nll": lambda x, s: F.nll_loss(x.log_softmax(1), LABELS[s], WEIGHT),
    "mse": lambda x, s: F.mse_loss(x, OTHER[s]),
    "mse, weighted": lambda x, s: F.mse_loss(x, OTHER[s], weight=OTHER[s]),
    "l1": lambda x, s: F.l1_loss(x, OTHER[s]),
    "smooth l1": lambda x, s: F.smooth_l1_loss(x, OTHER[s], beta=0.5),
    "huber": lambda x, s: F.huber_loss(x, OTHER[s], delta=0.5),
    "huber, weighted": lambda x, s: F.huber_loss(x, OTHER[s], weight=OTHER[s]),
    "binary": lambda x, s: F.binary_cross_entropy(x.sigmoid(), OTHER[s], weight=WEIGHT),
    "binary with logits": lambda x, s: F.binary_cross_entropy_with_logits(x, OTHER[s], pos_weight=WEIGHT),
    "kl, mean": lambda x, s: F.kl_div(x.log_softmax(1), OTHER[s].softmax(1), reduction="mean"),
    "kl, batchmean": lambda x, s: F.kl_div(x.log_softmax(1), OTHER[s].softmax(1), reduction="batchmean"),
    "poisson": lambda x, s: F.poisson_nll_loss(x, OTHER[s]),
    "gaussian": lambda x, s: F.gaussian_nll_loss(x, OTHER[s], OTHER[s] + 0.1),
    "soft margin": lambda x, s: F.soft_margin_loss(x, OTHER[s].round() * 2 - 1),
    "margin ranking": lambda x, s: F.margin_ranking_loss(x[:, 0], x[:, 1], SIGNS[s]),
    "hinge embedding": lambda x, s: F.hinge_embedding_loss(x[:, 0], SIGNS[s]),
    "cosine embedding": lambda x, s: F.cosine_embedding_loss(x, OTHER[s], SIGNS[s]),
    "triplet": lambda x, s: F.triplet_margin_loss(x, OTHER[s], x.flip(1)),
    "multi margin": lambda x, s: F.multi_margin_loss(x, LABELS[s].clamp(min=0)),
    "multilabel soft margin": lambda x, s: F.multilabel_soft_margin_loss(x, OTHER[s].round()),
    "ctc": lambda x, s: _ctc(x, s),
    "ctc, lengths as numbers": lambda x, s: _ctc(x, s, tuple),
    "sum": lambda x, s: F.mse_loss(x, OTHER[s], reduction="sum"),
    "mean of everything": lambda x, s: x.square().mean(),
    "mean of rows": lambda x, s: (torch.mean(x, 0) * WEIGHT).sum(),
    "mean of rows, negative dims": lambda x, s: x.mean((-2, -1), keepdim=True).sum(),
    "mean of columns": lambda x, s: x.square().mean(1).sum(),
    "two means": lambda x, s: F.cross_entropy(x, LABELS[s]) + 0.1 * x.square().mean(),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", LOSSES)
def test_shares_and_their_gradients_add_up(name: str) -> None:
    loss = LOSSES[name]
    whole = SCORES.clone().requires_grad_(True)
    wanted = loss(whole, slice(None))
    wanted.backward()
    with GlobalReduction(CPU, record=True) as recorder:
        loss(whole.detach(), slice(None))
    shares, parts = [], SCORES.clone().requires_grad_(True)
    for rows in SLICES:
        with GlobalReduction(CPU, denominators=recorder.local_denominators):
            shares.append(loss(parts[rows], rows))
    torch.stack(shares).sum().backward()
    torch.testing.assert_close(sum(share.detach() for share in shares), wanted.detach(), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-5, atol=1e-7)


def test_largest_and_smallest_numbers_are_those_of_the_batch_only_where_they_are_asked_for() -> None:
    """Of fractions those without a gradient, which observers of a quantization take."""
    lengths = torch.tensor([3, 5, 4])
    with GlobalReduction(CPU, record=True) as plain:
        assert lengths.max() == 5
    assert plain.saw == {"extremes"} and plain.local_denominators == []
    known = [torch.tensor(9.0, dtype=torch.float64), torch.tensor(-2.0, dtype=torch.float64)]
    with GlobalReduction(CPU, denominators=known, rules=MeanRules(extremes=True)):
        assert (torch.max(lengths).item(), lengths.min().item()) == (9, 2)
        assert lengths.max(0).values == 5 and lengths.float().requires_grad_().amax() == 5 and lengths.bool().max()
    known = [torch.tensor(9.5, dtype=torch.float64), torch.tensor([-2.5, 7.5], dtype=torch.float64)]
    with GlobalReduction(CPU, denominators=known, rules=MeanRules(extremes=True)):
        assert lengths.float().amax() == 9.5
        assert torch.aminmax(lengths.float()) == (2.5, 7.5)


def test_means_in_one_line_have_places_of_their_own() -> None:
    with GlobalReduction(CPU, record=True) as recorder:
        for _ in range(2):
            SCORES.mean(dim=0, keepdim=True).mean()
    first, of_first, again, of_again = recorder.mean_places.values()
    assert first == again and of_first == of_again and first != of_first


def test_loads_of_experts_are_those_of_the_batch_only_at_the_call_sites_that_are_named() -> None:
    def ask(mask: torch.Tensor) -> tuple[list[int], bool]:
        loads = mask.long().sum(1).tolist()
        return loads, bool(mask[0].any())

    mask = torch.tensor([[False, False, False], [True, False, True]])
    with GlobalReduction(CPU, record=True) as plain:
        assert ask(mask) == ([0, 2], False)
    assert plain.local_denominators == [] and set(map(len, plain.load_shapes.values())) == {1}
    known = [torch.tensor([4.0, 3.0]), torch.tensor(1.0)]
    with GlobalReduction(CPU, denominators=known, rules=MeanRules(loads=frozenset(plain.load_shapes))) as asking:
        assert ask(mask) == ([4, 3], True)
    assert [own.tolist() for own in asking.local_denominators] == [[0, 2], 0]


def test_numbers_of_true_elements_are_denominators_only_where_they_are_asked_for() -> None:
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    with GlobalReduction(CPU, record=True) as plain:
        assert mask[:1].sum() == 1
    assert plain.saw == {"counts"} and plain.local_denominators == []
    known = [torch.tensor(3.0), torch.tensor(9.0)]
    with GlobalReduction(CPU, denominators=known, rules=MeanRules(counts=True)) as counting:
        count = mask[:1].sum()
        assert (count.item(), count.dtype) == (3, torch.int64)
        assert mask[:1].sum(1).tolist() == [1] and mask.long().sum() == 3
        assert torch.count_nonzero(mask[:2]) == 9
    assert [float(local) for local in counting.local_denominators] == [1, 3]


def test_a_slice_without_targets_has_share_zero_and_none_at_all_is_nan() -> None:
    nothing = torch.full((2,), -100)
    with GlobalReduction(CPU, denominators=[torch.tensor(5.0)]):
        assert F.cross_entropy(SCORES[:2], nothing).item() == 0
    with GlobalReduction(CPU, record=True):
        assert F.cross_entropy(SCORES[:2], nothing).isnan()
    assert F.cross_entropy(SCORES[:2], nothing).isnan()


@pytest.mark.parametrize("expected", [1, 3])
def test_another_number_of_means_is_an_error(expected: int) -> None:
    with (
        pytest.raises(ExactnessError, match="means over the batch"),
        GlobalReduction(CPU, denominators=[torch.tensor(1.0)] * expected),
    ):
        LOSSES["two means"](SCORES, slice(None))


@pytest.mark.parametrize("name", ["classifier", "gpt2", "llama"])
def test_denominators_are_found_on_meta(name: str) -> None:
    model, batch = make_model(name), make_batch(name, 0)
    with torch.no_grad(), GlobalReduction(CPU, record=True) as real:
        model(**batch)
    with torch.no_grad(), MetaReduction(CPU) as found:
        result: Any = copy.deepcopy(model).to("meta")(**batch)
    assert [float(d) for d in found.local_denominators] == [float(d) for d in real.local_denominators]
    assert (result[0] if isinstance(result, tuple) else result.loss).is_meta
