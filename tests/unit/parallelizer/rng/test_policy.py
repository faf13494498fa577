"""Which numbers a call draws: the same or others on each worker, counted, and repeated."""

from __future__ import annotations

import random

import pytest
import torch

from moreh_ap.parallelizer.rng.draw_recording import Coins, DrawRecorder
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
GPU = torch.device("meta")
"""Stands in for a GPU: what is drawn there does not come from the CPU's stream."""


@pytest.fixture(autouse=True)
def leave_streams_alone():
    with streams_untouched(None):
        yield


def first_number(policy: RandomPolicy, **place: int) -> float:
    policy.begin(CPU, **place)
    return torch.rand(()).item()


def test_a_seed_gives_each_worker_micro_batch_and_stage_numbers_of_its_own():
    seeded = RandomPolicy(seed=3)
    places = [{}, {"micro_batch": 1}, {"stage": 1}, {"micro_batch": 1, "stage": 1}]
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


@pytest.mark.parametrize("has_stream", [True, False])
def test_workers_on_gpus_flip_the_same_coins_on_the_cpu(has_stream):
    """Else each would leave out other layers, and with sharded layers wait for a message that no worker sends."""
    torch.manual_seed(1)
    streams = current_streams() if has_stream else Streams(None, current_streams().host)
    alone = torch.rand(3).tolist()
    coins = []
    for worker in range(2):
        policy = RandomPolicy.of(7, streams, has_one_stream=True).shared(worker, Share(worker, worker + 1, 2), Draws())
        for micro_batch in range(2):
            policy.begin(GPU, micro_batch)
            coins.append(torch.rand(3).tolist())
    assert coins == coins[:1] * 4 and (coins[0] == alone) is has_stream


def test_of_a_gpus_worker_only_what_it_draws_on_the_cpu_is_that_of_the_whole_batch():
    def forward(policy: RandomPolicy, rows: int) -> None:
        policy.begin(GPU)
        draw(rows)

    def draw(rows: int) -> list[float]:
        on_gpu = torch.nn.functional.dropout(torch.ones(rows, 5, device=GPU), 0.5)
        torch.nn.functional.scaled_dot_product_attention(*[torch.rand(rows, 1, 4, 8, device=GPU)] * 3, dropout_p=0.5)
        assert torch.rand_like(on_gpu).shape == (rows, 5)
        return [torch.rand([]).item(), *torch.rand(rows, 1).flatten().tolist()]

    streams = current_streams()
    policy = RandomPolicy.of(7, streams, has_one_stream=True)
    assert not policy.covers(GPU) and policy.covers(CPU)
    found = policy.find_draws(GPU, forward)
    assert [(one.name, one.rows) for one in found.stream] == [("rand", None), ("rand", Rows(0, (0, 1)))]
    policy.begin(GPU)
    whole = draw(4)
    for worker in range(2):
        drawing = policy.shared(worker, Share(2 * worker, 2 * worker + 2, 4), found).begin(GPU)
        with drawing.forward():
            assert draw(2) == [whole[0], *whole[1 + 2 * worker : 3 + 2 * worker]]
        assert drawing.moved()


def test_ranks_on_gpus_take_their_numbers_of_a_region_from_the_gpus_stream(monkeypatch):
    """A region leaves the CPU's stream alone, and the next region has other numbers."""
    gpu = torch.device("cuda", 0)
    state = torch.tensor([5, 8]).view(torch.uint8)
    states = {"now": state}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states["now"].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new, device: states.update(now=new))
    seeded = lambda number: torch.tensor([number, 0]).view(torch.uint8)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda number: states.update(now=seeded(number)))
    before = torch.get_rng_state()
    inside, after = {}, []
    for rank in range(2):
        states["now"] = state
        for region in range(2):
            stream = OwnStream(rank, gpu)
            inside[rank, region] = states["now"].view(torch.int64).tolist()
            stream.swap()
        after.append(states["now"].view(torch.int64).tolist())
    assert len({seed for seed, _ in inside.values()}) == 4 and after == [[5, 16], [5, 16]]
    assert torch.equal(before, torch.get_rng_state())


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


@pytest.mark.parametrize(("seed_of", "wanted"), [(lambda: OwnStream(0, CPU), False), (lambda: torch.rand(()), True)])
def test_the_seed_of_a_region_decides_nothing_and_a_number_of_the_script_may(seed_of, wanted):
    """A number that may decide what is drawn next has the trial repeated with six other streams."""
    coins = Coins()
    for _ in range(2):
        with DrawRecorder(coins) as recorder:
            seed_of()
        assert len(recorder.drawn) == 1
        coins.again()
    assert coins.found is wanted
