"""What tells where the host's streams stand: other after every draw, the same after everything else."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch

from moreh_ap.parallelizer.rng import host_position as module
from moreh_ap.parallelizer.rng.host_position import host_position
from moreh_ap.protocol.rng_state import host_untouched, set_state_of_host, state_of_host

DRAWS = {
    "random": random.random,
    "gauss": lambda: random.gauss(0.0, 1.0),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "rand": np.random.rand,
    "randn": np.random.randn,
    "binomial": lambda: np.random.binomial(5, 0.5),
    "permutation": lambda: np.random.permutation(3),
}


@pytest.fixture(autouse=True)
def leave_streams_alone():
    with host_untouched():
        yield


@pytest.fixture(params=["memory", "states"])
def told_by(request, monkeypatch):
    """The bytes in memory, and states where the bytes are not those that are expected."""
    forget()
    if request.param == "states":
        monkeypatch.setattr(module, "_STATE_BYTES", module._STATE_BYTES - 4)
    yield request.param
    forget()


def forget():
    module._place_of_python.cache_clear()
    module._place_of_numpy.cache_clear()


def test_memory_tells_in_this_interpreter(told_by):
    assert (module._place_of_python() is None) == (told_by == "states")
    assert (module._place_of_numpy(np.random.get_bit_generator()) is None) == (told_by == "states")


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_draw_is_told(told_by, draw):
    for _ in range(700):  # further than all words of a state
        before = host_position()
        draw()
        assert host_position() != before


def test_nothing_else_is_told(told_by):
    before = host_position()
    torch.rand(3)
    random.Random(1).random()
    np.random.RandomState(1).randn()
    np.random.default_rng(1).random()
    more = [random, np.random, random.getstate, np.random.get_state, np.random.mtrand._rand]
    del more
    gc.collect()
    assert host_position() == before


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_state_that_is_put_back_is_the_same_place(told_by, draw):
    before, state = host_position(), state_of_host()
    draw()
    set_state_of_host(state)
    assert host_position() == before


def test_a_number_that_is_left_is_told_although_no_word_is_drawn_for_it(told_by):
    np.random.seed(0)
    np.random.randn()
    before, words = host_position(), np.random.get_state()[1].tolist()
    np.random.randn()
    assert host_position() != before and np.random.get_state()[1].tolist() == words


def test_another_generator_of_numpy_is_told_too(told_by):
    usual = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        before = host_position()
        np.random.rand()
        assert host_position() != before
    finally:
        np.random.set_bit_generator(usual)
