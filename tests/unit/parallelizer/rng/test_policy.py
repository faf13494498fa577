"""Which numbers a call draws: the same or others on each worker, counted, and repeated."""

from __future__ import annotations

import random

import pytest
import torch

from moreh_ap.parallelizer.rng.policy import (
    NUM_OTHER_STREAMS,
    Draws,
    HostReplay,
    OwnStream,
    RandomPolicy,
    current_streams,
    streams_untouched,
)
from moreh_ap.parallelizer.rng.shared_draws import Draw, Rows, Share
from moreh_ap.protocol.rng_state import Streams

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def leave_streams_alone():
    with streams_untouched(None):
        yield


def first_number(policy: RandomPolicy, **place: int) -> float:
    policy.begin(CPU, **place)
    return torch.rand(()).item()


def test_a_seed_gives_each_worker_micro_batch_and_stage_numbers_of_its_own():
    seeded = RandomPolicy(seed=3)
    places = [{}, {"chunk": 1}, {"stage": 1}, {"chunk": 1, "stage": 1}]
    numbers = {first_number(seeded, **place) for place in places}
    numbers.add(first_number(seeded.shared(1, Share(2, 4, 4), Draws())))
    assert len(numbers) == 5
    assert first_number(seeded) == first_number(RandomPolicy(seed=3))


def test_without_a_seed_and_a_stream_the_generator_is_left_where_it_is():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    RandomPolicy().begin(CPU)
    assert torch.equal(before, torch.get_rng_state())


def test_a_common_stream_comes_before_a_seed_except_in_a_pipeline():
    torch.manual_seed(1)
    streams = current_streams()
    wanted = torch.rand(()).item()
    assert first_number(RandomPolicy.of(7, streams, has_one_stream=True)) == wanted
    own = RandomPolicy.of(7, streams, has_one_stream=False)
    assert own.stream is None and own.host == streams.host and first_number(own) != wanted
    assert RandomPolicy.of(7, None, has_one_stream=True) == RandomPolicy(7)
    assert RandomPolicy.of(7, Streams(None, streams.host), has_one_stream=True).stream is None


def test_rows_of_a_micro_batch_are_counted_in_the_whole_batch():
    policy = RandomPolicy(seed=1).shared(1, Share(4, 8, 8), Draws()).of_rows(1, 3)
    assert policy.share == Share(5, 7, 8)
    assert RandomPolicy(seed=1).of_rows(1, 3) == RandomPolicy(seed=1)


@pytest.mark.parametrize(
    "draw, moves_host, moves", [(random.random, True, True), (lambda: torch.rand(1), False, True), (int, False, False)]
)
def test_it_is_noticed_whether_anything_was_drawn(draw, moves_host, moves):
    drawing = RandomPolicy(seed=1).begin(CPU)
    draw()
    assert (drawing.moved_host(), drawing.moved()) == (moves_host, moves)


def test_draws_that_follow_a_number_of_python_are_found_with_other_states_too():
    def forward(policy: RandomPolicy, rows: int) -> None:
        policy.begin(CPU)
        torch.rand(rows, 3) if random.random() < 0.5 else torch.randn(2, rows, 4)

    streams = Streams(current_streams().torch, current_streams().host)
    found = RandomPolicy.of(1, streams, has_one_stream=True).find_draws(CPU, forward).stream
    assert set(found) == {Draw("rand", 2, Rows(0, (0, 1))), Draw("randn", 3, Rows(1, (0, 1, 2)))}
    assert RandomPolicy(seed=1).find_draws(CPU, forward) == Draws()


def test_draws_that_follow_a_single_number_of_the_stream_are_found_with_other_states_too():
    """Two rows draw more than one before the number that decides, which would be another for them."""
    seen = []

    def forward(policy: RandomPolicy, rows: int) -> None:
        policy.begin(CPU)
        torch.nn.functional.dropout(torch.ones(rows, 5), 0.5)
        coin = torch.rand([])
        seen.append((rows, coin.item()))
        torch.rand(rows, 3, 2) if coin < 0.5 else torch.randn(2, rows, 4, 1)

    streams = Streams(current_streams().torch, current_streams().host)
    found = RandomPolicy.of(1, streams, has_one_stream=True).find_draws(CPU, forward).stream
    assert {(draw.name, draw.num_dims) for draw in found} == {("bernoulli_", 2), ("rand", 0), ("rand", 3), ("randn", 4)}
    coins = [[coin for rows, coin in seen if rows == number] for number in (1, 2)]
    assert coins[0] == coins[1] and len(set(coins[0])) == 1 + NUM_OTHER_STREAMS


def test_a_number_for_each_row_is_no_single_number():
    runs = []

    def forward(policy: RandomPolicy, rows: int) -> None:
        policy.begin(CPU)
        runs.append(rows)
        torch.rand(rows, 1)

    streams = Streams(current_streams().torch, current_streams().host)
    assert RandomPolicy.of(1, streams, has_one_stream=True).find_draws(CPU, forward).stream == (
        Draw("rand", 2, Rows(0, (0, 1))),
    )
    assert runs == [1, 2]


def test_where_devices_have_streams_of_their_own_only_draws_of_the_host_are_compared():
    """Fused attention draws what nobody sees, which matters for a common stream alone."""

    def forward(policy: RandomPolicy, rows: int) -> None:
        policy.begin(CPU)
        for _ in range(rows):
            random.random()
        query = torch.ones(rows, 1, 4, 8)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        torch.rand(rows + 3)

    streams = Streams(None, current_streams().host)
    found = RandomPolicy.of(1, streams, has_one_stream=True).find_draws(CPU, forward)
    assert found.stream == () and [len(block.calls) for block in found.host] == [1]


def test_streams_of_the_host_are_repeated_and_put_back():
    random.seed(4)
    replay = HostReplay()
    first, second = random.random(), random.random()
    with replay.again():
        assert random.random() == first
    random.seed(4)
    assert [random.random(), random.random()] == [first, second]


def test_ranks_draw_their_own_numbers_in_a_region_and_the_same_after_it():
    inside, after = [], []
    for rank in range(2):
        torch.manual_seed(2)
        stream = OwnStream(rank, CPU)
        inside.append(torch.rand(()).item())
        stream.swap()
        after.append(torch.rand(()).item())
    assert inside[0] != inside[1] and after[0] == after[1]
