"""The source of random numbers of remote forwards.

Decides what a seed and a state are, and whether workers continue one common stream. Must not know how they draw.
"""

from __future__ import annotations

import struct

import torch

from moreh_ap.protocol.rng_state import Streams, set_state_of_host, state_of_host, state_of_stream

_64_BITS = 0xFFFFFFFFFFFFFFFF
_SEED_AND_OFFSET = struct.Struct("<QQ")


class AcceleratorGenerator:
    """The accelerator's random number generator: a seed and a counter, as on a GPU.

    Every remote forward takes the next number of the stream, so that a run is reproduced by its seed whatever the
    controller draws for itself (shuffling, sampling). Forwards do not touch the process's own generator.

    Attributes:
        workers_tell_draws: Whether the reply to every forward says whether it drew random numbers.
    """

    workers_tell_draws = False

    def __init__(self) -> None:
        self._seed, self._offset = torch.initial_seed() & _64_BITS, 0

    def manual_seed(self, seed: int) -> None:
        """Restarts the stream; a negative seed counts down from 2**64, as in PyTorch."""
        self._seed, self._offset = seed & _64_BITS, 0

    def initial_seed(self) -> int:
        return self._seed

    def state(self) -> bytes:
        """Returns the state of the stream for `set_state`; its size is constant."""
        return _SEED_AND_OFFSET.pack(self._seed, self._offset)

    def set_state(self, state: bytes) -> None:
        """Continues the stream from a state."""
        self._seed, self._offset = _SEED_AND_OFFSET.unpack(state[: _SEED_AND_OFFSET.size])

    def next_seed(self) -> int:
        """Returns the seed of the next remote forward."""
        self._offset += 1
        # splitmix64: neighbouring (seed, offset) pairs give unrelated streams. Source: Steele et al., OOPSLA 2014.
        mixed = (self._seed + self._offset * 0x9E3779B97F4A7C15) & _64_BITS
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64_BITS
        return (mixed ^ (mixed >> 31)) >> 1

    def streams(self) -> Streams:
        """What all workers go on from in the next remote forward; PyTorch's numbers from `next_seed`, each its own."""
        return Streams(None, state_of_host())

    def go_on_from(self, streams: Streams) -> None:
        """Records the random states after a remote forward."""
        set_state_of_host(streams.host)


class GpuGenerator(AcceleratorGenerator):
    """The generator of an accelerator of GPUs. What a forward draws on the CPU comes from the process's own generator.

    Without the one line it would too: a coin that decides whether a layer is left out, the mask of a whole path.
    """

    def streams(self) -> Streams:
        return Streams(state_of_stream(), state_of_host())

    def go_on_from(self, streams: Streams) -> None:
        super().go_on_from(streams)
        if streams.torch is not None:
            _set_state_of_stream(streams.torch)


class ProcessGenerator(GpuGenerator):
    """The generator of an accelerator of CPU workers: the process's own CPU generator.

    Without the one line the script's model would draw from it too, between the script's own draws.
    """

    workers_tell_draws = True

    def state(self) -> bytes:
        return super().state() + state_of_stream()

    def set_state(self, state: bytes) -> None:
        super().set_state(state)
        of_process = state[_SEED_AND_OFFSET.size :]
        if of_process:  # a checkpoint of a GPU accelerator has no such state
            _set_state_of_stream(of_process)


def _set_state_of_stream(state: bytes) -> None:
    torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
