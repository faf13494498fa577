"""States of random streams: PyTorch's on the CPU, and those that Python's `random` and NumPy draw from.

Decides what a state is and how it is put back. Must not know who draws, or what.

[Note: streams of the host]
A forward may flip a coin with `random` or `numpy.random` (LayerDrop, masks of speech models, self-conditioning). One
process has one stream of each, whatever its device. So a call of such a forward carries their states, every worker goes
on from them and flips the same coin, and the script goes on from where the forward left them. Where a forward draws for
each row in turn, each worker also makes the calls for the rows of the others (`parallelizer.rng.host_draws`).
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Streams(NamedTuple):
    """The states of the random streams before or after a remote forward.

    Attributes:
        torch: The state of PyTorch's CPU generator; None where workers have streams of their own.
        host: The states of Python's and NumPy's streams, as `state_of_host` returns them.
    """

    torch: bytes | None
    host: bytes


def state_of_stream() -> bytes:
    """Returns the state of the CPU's stream, as `torch.get_rng_state` does."""
    return torch.default_generator.get_state().numpy().tobytes()


def state_of_host() -> bytes:
    """Returns the pickled state of Python's stream, and of NumPy's if NumPy is imported."""
    numpy = sys.modules.get("numpy.random")
    return pickle.dumps((random.getstate(), None if numpy is None else numpy.get_state(legacy=False)))


def set_state_of_host(state: bytes) -> None:
    """Sets Python's stream and NumPy's to a state of `state_of_host`."""
    of_python, of_numpy = pickle.loads(state)
    random.setstate(of_python)
    if of_numpy is not None:
        from numpy.random import set_state

        set_state(of_numpy)


def seeded_state_of_host(seed: int) -> bytes:
    """Returns the pickled states after ``random.seed(seed)`` and ``numpy.random.seed(seed)``."""
    with host_untouched():
        random.seed(seed)
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed(seed)
        return state_of_host()


@contextlib.contextmanager
def host_untouched() -> Iterator[None]:
    """Puts Python's and NumPy's streams back after the block."""
    state = state_of_host()
    try:
        yield
    finally:
        set_state_of_host(state)
