"""Random numbers of a batch, drawn by several workers: together they have what one device draws."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from moreh_ap.errors import ExactnessError
from moreh_ap.parallelizer.observation.call_sites import FORWARD
from moreh_ap.parallelizer.rng.draw_recording import Drawn, DrawRecorder, draws_of
from moreh_ap.parallelizer.rng.routed_rows import KnownCounts
from moreh_ap.parallelizer.rng.shared_draws import Draw, Rows, Share, SharedDraws, UnsharedDraw, have_several, repeated

BATCH = torch.linspace(-1, 1, 4 * 6 * 8).reshape(4, 6, 8)


def recorded(forward, batch=BATCH, **may):
    """How the rows lie in what `forward` draws."""
    found = []
    for rows in (1, 2):
        with DrawRecorder() as recorder:
            forward(batch[:rows])
        found.append(recorder.drawn)
    return draws_of(*found, **may)


def in_parts(forward, draws, parts, batch=BATCH):
    """The results of a forward on consecutive parts of the batch, each from the same state of the stream."""
    state, start, results, after = torch.get_rng_state(), 0, [], []
    for rows in parts:
        torch.set_rng_state(state)
        with SharedDraws(draws, Share(start, start + rows, len(batch))):
            results.append(forward(batch[start : start + rows]))
        after.append(torch.get_rng_state())
        start += rows
    assert all(torch.equal(one, after[0]) for one in after)
    return torch.cat(results)


ENCODER = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
RECURRENT = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)
FORWARDS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "channels": lambda x: F.dropout2d(x[:, :, None], 0.5),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "noise": lambda x: x + torch.randn_like(x),
    "noise of a size": lambda x: x + torch.rand(x.shape) + torch.randn(len(x), 1, 1),
    "tokens of all rows in one dim": lambda x: F.dropout(x.reshape(-1, 8), 0.5).reshape(x.shape),
    "rows in the second dim": lambda x: F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1),
    "uniform": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "normal of a mean": lambda x: torch.normal(x, 1.0),
    "whole rows are dropped": lambda x: x * x.new_empty(len(x), 1, 1).bernoulli_(0.5),
    "probabilities": lambda x: torch.bernoulli(x.sigmoid()),
    "samples": lambda x: torch.multinomial(x[:, 0].softmax(-1), 3).float(),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "encoder": ENCODER,
    "lstm": lambda x: RECURRENT(x)[0],
    "the same for all rows": lambda x: x * F.dropout(torch.ones(8), 0.5),
    "the same order for all rows": lambda x: x[:, torch.randperm(6)],
    "a layer is dropped": lambda x: x * 2 if torch.rand(()) < 0.5 else x,
    "one after another": lambda x: F.dropout(x, 0.1) + torch.randn_like(x[:, :1]) * F.dropout(torch.ones(6, 8), 0.5),
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("parts", [(2, 2), (1, 3), (4,)])
def test_parts_of_a_batch_draw_what_the_batch_draws(name, parts):
    forward = FORWARDS[name]
    torch.manual_seed(1)
    draws = recorded(forward)
    assert draws
    torch.manual_seed(5)
    state = torch.get_rng_state()
    whole, after = forward(BATCH), torch.get_rng_state()
    torch.set_rng_state(state)
    torch.testing.assert_close(in_parts(forward, draws, parts), whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), after), "the stream does not stand where one device leaves it"


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_draws_the_same_once_more(reentrant):
    layer = nn.Linear(8, 8)

    def forward(x):
        hidden = F.dropout(x, 0.2)
        return checkpoint(lambda h: F.dropout(layer(h), 0.5) ** 2, hidden.requires_grad_(), use_reentrant=reentrant)

    draws = recorded(lambda x: forward(x).detach())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    forward(BATCH).sum().backward()
    wanted, layer.weight.grad = layer.weight.grad, None
    for start in (0, 2):
        torch.set_rng_state(state)
        shared = SharedDraws(draws, Share(start, start + 2, 4))
        with shared:
            result = forward(BATCH[start : start + 2])
        with shared.again():
            result.sum().backward()
    torch.testing.assert_close(layer.weight.grad, wanted)


def test_nothing_is_recorded_of_a_forward_that_draws_nothing():
    assert recorded(lambda x: x.sin()) == ()


def test_fused_attention_without_dropout_draws_nothing():
    heads = BATCH.reshape(4, 6, 2, 4).transpose(1, 2)
    assert recorded(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), heads) == ()


def test_parts_draw_from_a_generator_of_the_model_what_the_batch_draws():
    generator = torch.Generator()

    def forward(x):  # every worker's copy is in the same state
        generator.manual_seed(3)
        return x + torch.rand(x.shape, generator=generator) * torch.rand(x.shape, generator=generator)

    torch.testing.assert_close(in_parts(forward, recorded(forward), (1, 3)), forward(BATCH))


def permuted(x):
    return x[torch.randperm(len(x))]


def different(x):
    return sum((torch.rand(()) for _ in x), start=x)


@pytest.mark.parametrize(
    "forward, reason",
    [
        (permuted, "rows before it"),
        (lambda x: torch.poisson(x.abs()), "rows before it"),
        (different, "depends on the rows"),
        (lambda x: x + torch.rand(len(x) + 1)[0], "two rows"),
    ],
)
def test_draws_that_cannot_be_shared_are_refused(forward, reason):
    with pytest.raises(UnsharedDraw, match=reason):
        recorded(forward)


@pytest.mark.parametrize("parts", [(2, 2), (1, 3)])
def test_a_worker_may_have_its_part_of_a_permutation_of_all_rows(parts):
    def permutation(x):
        return torch.randperm(len(x)) + torch.distributions.Beta(0.4, 0.4).sample()

    draws = recorded(permutation, may_permute=True)
    assert [(draw.name, draw.rows) for draw in draws] == [("randperm", Rows(0, (0,))), ("_sample_dirichlet", None)]
    state = torch.get_rng_state()
    expected = permutation(BATCH)
    torch.set_rng_state(state)
    assert torch.equal(in_parts(permutation, draws, parts), expected)


def masked(x):
    """Drops some of the positive numbers of each row: other rows have more of them."""
    result = torch.zeros_like(x)
    result[x > 0.1] = F.dropout(x[x > 0.1], 0.5)
    return result


def chosen(x):
    """The same, of what was found first in one dim of a row and then in the others."""
    choice, row = torch.where(x.permute(1, 0, 2).flatten(1) > 0.1)
    result = torch.zeros_like(x.transpose(0, 1)).flatten(1)
    result[choice, row] = F.dropout(torch.ones(len(row)), 0.5)
    return result.view(6, -1, 8).transpose(0, 1)


@pytest.mark.parametrize("forward", [masked, chosen])
@pytest.mark.parametrize("parts", [(2, 2), (1, 3), (1, 1, 1, 1)])
def test_rows_of_which_only_their_own_worker_knows_how_many_there_are(forward, parts, monkeypatch):
    monkeypatch.setattr(
        "moreh_ap.parallelizer.observation.call_sites.FORWARD", __name__
    )  # what leads there is left out
    torch.manual_seed(1)
    batch = torch.randn(4, 6, 8)
    drawn = []
    for rows in (1, 2):
        with DrawRecorder() as recorder:
            forward(batch[:rows])
        drawn.append(recorder.drawn)
    with pytest.raises(UnsharedDraw, match="two rows"):
        draws_of(*drawn)
    draws, counts, state = draws_of(*drawn, may_route=True), KnownCounts(), torch.get_rng_state()
    assert [draw.rows.groups for draw in draws] == [1 if forward is masked else 6]
    results, start = [], 0
    for rows in (4, *parts):
        torch.set_rng_state(state)
        first = 0 if rows == 4 else start
        counts.restart()
        with SharedDraws(draws, Share(first, first + rows, 4), counts):
            results.append(forward(batch[first : first + rows]))
        start = first + rows if rows != 4 else 0
    torch.set_rng_state(state)
    wanted = forward(batch)
    assert torch.equal(results[0], wanted) and torch.equal(torch.cat(results[1:]), wanted)


def test_rows_that_are_routed_otherwise_than_with_all_others_are_refused():
    draws = draws_of(*([Drawn("bernoulli_", (number, 2), (0, 1), 7, (0, 0))] for number in (2, 5)), may_route=True)
    assert draws == (Draw("bernoulli_", 2, Rows(0, (0, 1), groups=1), 7),)
    counts = KnownCounts()
    assert counts.add_up(9, [5], Share(0, 4, 4)) == ([0], [5])
    counts.restart()
    assert counts.add_up(9, [3], Share(0, 2, 4)) == ([0], [5])
    counts.restart()
    with pytest.raises(UnsharedDraw, match="depends on other rows"):
        counts.add_up(9, [3], Share(2, 4, 4))


def test_whether_each_row_draws_its_own_numbers_may_not_be_clear():
    """As many for one row as for two, beside draws for routed rows of as many dims at another place."""
    one = [Drawn("bernoulli_", (2, 8), (0, 1), 7, (0, 0)), Drawn("bernoulli_", (0, 8), (0, 1), 8, (0, 0))]
    two = [Drawn("bernoulli_", (5, 8), (0, 1), 7, (0, 0)), Drawn("bernoulli_", (0, 8), (0, 1), 8, (0, 0))]
    with pytest.raises(UnsharedDraw, match="is not clear"):
        draws_of(one, two, may_route=True)


def test_draws_inside_a_function_that_nobody_knows_are_refused(monkeypatch):
    monkeypatch.setattr("moreh_ap.parallelizer.rng.draw_recording.MAY_DRAW", frozenset())
    with pytest.raises(UnsharedDraw, match="cannot be looked into"):
        recorded(lambda x: F.dropout(x, 0.5))


def test_a_forward_that_draws_more_often_than_it_did_shares_what_is_drawn_as_before():
    draws = recorded(lambda x: F.dropout(x, 0.5))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    wanted = F.dropout(F.dropout(BATCH, 0.5), 0.5)
    for start in (0, 2):
        torch.set_rng_state(state)
        with SharedDraws(draws, Share(start, start + 2, 4)):
            assert torch.equal(F.dropout(F.dropout(BATCH[start : start + 2], 0.5), 0.5), wanted[start : start + 2])


def test_a_draw_that_was_not_there_before_is_an_error():
    draws = recorded(lambda x: F.dropout(x, 0.5))
    with (
        pytest.raises(ExactnessError, match="1-dimensional random numbers with rand"),
        SharedDraws(draws, Share(0, 2, 4)),
    ):
        F.dropout(BATCH[:2], 0.5)
        torch.rand(2)


def test_draws_of_which_some_are_skipped_are_told_apart_or_refused():
    draws = recorded(lambda x: F.dropout(x, 0.5) + torch.rand(4, *x.shape[1:])[0])
    both = recorded(lambda x: F.dropout(x.mT, 0.5).mT + F.dropout(x, 0.5))
    shared = SharedDraws(draws, Share(0, 2, 4))
    with shared:
        torch.rand(4, *BATCH.shape[1:])
    shared.end()
    shared = SharedDraws(both, Share(0, 2, 4))
    with shared:
        F.dropout(BATCH[:2].mT, 0.5)
    with pytest.raises(ExactnessError, match="1 times, and 2 times before"):
        shared.end()


def prenet_and_postnet(x, steps=6):
    """As Tacotron 2: rows in the second dim, then as many draws as there are steps, then rows in the first dim."""
    first = F.dropout(x[:, :steps].transpose(0, 1), 0.5)
    second = torch.stack([F.dropout(step, 0.5) for step in first], 1)
    return F.dropout(second.transpose(1, 2), 0.5).transpose(1, 2).mean(1)


@pytest.mark.parametrize("steps", [6, 3])
def test_draws_that_differ_are_known_by_their_place_where_there_are_more_or_fewer_steps(steps):
    namespace = {"__name__": FORWARD, "run": prenet_and_postnet}
    exec("def forward(x, steps=6):\n    return run(x, steps)", namespace)  # places are told from there on
    forward = namespace["forward"]
    draws = recorded(forward)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    expected = prenet_and_postnet(BATCH, steps)
    torch.set_rng_state(state)
    assert torch.equal(in_parts(functools.partial(forward, steps=steps), draws, (3, 1)), expected)


def two_views(x):
    """Drops whole rows of two pictures of each row, which lie one behind the other."""
    views = torch.cat([x, -x])
    return (views * views.new_empty(len(views), 1, 1).bernoulli_(0.5)).view(2, *x.shape).transpose(0, 1)


@pytest.mark.parametrize("parts", [(2, 2), (1, 3), (4,)])
def test_two_pictures_of_each_row(parts):
    draws = recorded(two_views)
    assert have_several(draws) and not have_several(recorded(FORWARDS["dropout"]))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    expected = two_views(BATCH)
    torch.set_rng_state(state)
    assert torch.equal(in_parts(two_views, repeated(draws), parts), expected)


@pytest.mark.parametrize("probability", [0.999, 0.001])
@pytest.mark.parametrize(
    "mask",
    [
        lambda x, p: x.new_empty(len(x), 1).bernoulli_(p),
        lambda x, p: (p + torch.rand(len(x), 1)).floor(),
        lambda x, p: (torch.rand_like(x[:, :1]) < p).float(),
        lambda x, p: (x.new_empty(len(x), 1).uniform_() < p).float(),
    ],
)
def test_a_trial_shows_which_entries_a_row_has(mask, probability):
    draws = (Draw("bernoulli_", 2, Rows(0, (0, 1))),)
    draws += tuple(Draw(name, 2, Rows(0, (0, 1))) for name in ("rand", "rand_like", "uniform_"))
    with SharedDraws(draws, Share(0, 2, 2), is_trial=True):
        assert len(set(mask(torch.ones(4, 3), probability).flatten().tolist())) == 2
    torch.manual_seed(0)
    with SharedDraws(draws, Share(0, 4, 4), is_trial=True):  # one number a row
        assert len(set(mask(torch.ones(4, 3), probability).flatten().tolist())) == 1
