"""Which random streams a call draws from, how they are seeded, how draws are recorded, and how they are repeated.

Decides all of this in one place; other modules ask. Must not know models, plans or messages.

[Note: streams]
A worker has three kinds of streams: PyTorch's on the CPU, PyTorch's on its GPU, and those of Python and NumPy (the
host's). On the CPU all workers go on from the state of the script's stream, draw for the whole batch and keep the
numbers of their rows (`shared_draws.py`). On GPUs each worker seeds the GPU's stream for itself. The CPU's stream and
the host's always start where the script's are, so that every worker flips the same coins: a model on a GPU may draw on
the CPU which of its layers are left out.

[Note: random numbers of a region]
Outside of regions that tensor parallelism splits, every rank computes the same and draws the same: all start from one
seed and draw the same shapes in the same order. Inside, ranks have different heads (with sequence parallelism:
different tokens) and need different masks. So a region with dropout draws one number from the common stream, seeds a
stream of this rank's own with that number plus the rank, and returns to the common stream at its end. Recomputation in
the backward repeats this, because the number comes from the common stream. On GPUs this is the GPU's stream, and the
one on the CPU stays as it is.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moreh_ap.parallelizer.rng.draw_recording import Coins, Drawn, DrawRecorder, draws_of
from moreh_ap.parallelizer.rng.host_draws import (
    HostDrawRecorder,
    RowDraws,
    SharedHostDraws,
    row_draws_of,
)
from moreh_ap.parallelizer.rng.host_position import host_position
from moreh_ap.parallelizer.rng.routed_rows import WorkerCounts
from moreh_ap.parallelizer.rng.shared_draws import Draw, Share, SharedDraws, repeated
from moreh_ap.parallelizer.rng.turns import KnownTurns, Turns
from moreh_ap.protocol.rng_state import (
    Streams,
    host_untouched,
    seeded_state_of_host,
    set_state_of_host,
    state_of_host,
    state_of_stream,
)

NUM_OTHER_STREAMS = 6
"""With how many other states of the streams a forward is tried whose way they may decide."""


@dataclass(frozen=True)
class Draws:
    """The draws of a forward, of which each worker takes the part of its rows.

    Attributes:
        stream: From the common CPU stream of PyTorch.
        host: From Python's and NumPy's streams, for each row in turn.
        are_for_routed: Whether some are drawn for routed rows, as a `Draw` with a site is.
    """

    stream: tuple[Draw, ...] = ()
    host: tuple[RowDraws, ...] = ()
    are_for_routed: bool = False


@dataclass(frozen=True)
class RandomPolicy:
    """The random numbers of one call; the same on every worker but for `worker` and `share`. See [Note: streams].

    Attributes:
        seed: Where PyTorch's streams start, but for that on the CPU if there is a `stream`; None leaves them where
            they are.
        stream: The state of the one CPU stream that all workers draw from, as `torch.get_rng_state` gives it.
        host: Where the host's streams start; None leaves them where they are.
        worker: Tells workers apart that each draw their own numbers from `seed`.
        draws: What a split call draws.
        share: The rows that this worker, or this micro-batch, draws for.
        turns: In which rows draw from the host's streams where one process runs them one after the other.
        is_trial: Whether a forward only finds something out.
    """

    seed: int | None = None
    stream: Tensor | None = None
    host: bytes | None = None
    worker: int = 0
    draws: Draws = Draws()
    share: Share | None = None
    turns: KnownTurns | None = None
    is_trial: bool = False

    @staticmethod
    def of(seed: int, streams: Streams | None, *, has_one_stream: bool) -> RandomPolicy:
        """Returns the policy of a call that is computed whole.

        Args:
            seed: Where PyTorch's streams start if there is no common one.
            streams: The states from which the script would go on; None where the call is known to draw nothing.
            has_one_stream: False for stages of a pipeline, which each draw from a stream of their own.
        """
        if streams is None:
            return RandomPolicy(seed)
        has_stream = has_one_stream and streams.torch is not None
        stream = torch.frombuffer(bytearray(streams.torch or b""), dtype=torch.uint8) if has_stream else None
        return RandomPolicy(seed, stream, streams.host)

    def shared(self, worker: int, share: Share, draws: Draws, turns: KnownTurns | None = None) -> RandomPolicy:
        """Returns the policy of a worker that computes some rows of the batch."""
        return replace(self, worker=worker, share=share, draws=draws, turns=turns)

    def of_rows(self, start: int, stop: int) -> RandomPolicy:
        """Returns the policy of a micro-batch: rows `start:stop` of this worker's."""
        return self if self.share is None else replace(self, share=self.share.narrow(start, stop))

    def for_probe(self) -> RandomPolicy:
        """Returns the policy of forwards that only find something out about a call: they all start alike."""
        return replace(self, seed=None, worker=0, draws=Draws(), share=None, is_trial=True)

    def fingerprint(self) -> Callable[[], int] | None:
        """Returns a function that hashes the positions of the streams; None where these do not depend on rows."""
        if self.draws.host:
            return _fingerprint_with_host
        return _stream_fingerprint if self.draws.stream else None

    def position(self) -> Callable[[], int] | None:
        """Returns a function that hashes the position of the common stream, None without one."""
        return None if self.stream is None else _stream_fingerprint

    def covers(self, device: torch.device) -> bool:
        """Says whether all that is drawn on a device comes from the one stream."""
        return self.stream is not None and device.type == "cpu"

    def begin(self, device: torch.device, micro_batch: int = 0, stage: int = 0) -> Drawing:
        """Puts the streams where a forward starts.

        Args:
            device: This worker's device.
            micro_batch: Which micro-batch it is of.
            stage: Which stage of a pipeline runs; ranks that split layers among them have the same numbers.
        """
        if self.host is not None:
            set_state_of_host(self.host)
        if self.seed is not None:
            of_stage = self.seed + 0xC2B2AE35 * stage
            own = of_stage + 0x9E3779B9 * self.worker + 0x85EBCA6B * micro_batch
            if device.type == "cuda":
                torch.cuda.manual_seed(own % 2**63)
            if self.stream is None:  # a GPU's worker has the same coins as others
                _seed(own if device.type == "cpu" else of_stage)
        if self.stream is not None:
            torch.default_generator.set_state(self.stream)
        if self.share is None:
            return Drawing()
        counts = None if self.turns is None else self.turns.counts
        shared = None if self.stream is None else SharedDraws(self.draws.stream, self.share, counts, self.is_trial)
        if self.turns is not None:
            self.turns.restart()
        host = SharedHostDraws(self.draws.host, self.share, self.turns) if self.draws.host else None
        return Drawing(shared, host)

    def find_draws(
        self,
        device: torch.device,
        forward: Callable[..., object],
        fewest: int = 1,
        *,
        in_turn: bool = False,
        may_permute: bool = False,
        repeat: bool = False,
    ) -> Draws:
        """Returns what a forward draws from the common streams, and how the rows lie in it.

        Args:
            device: This worker's device.
            forward: Runs so many rows of the batch with such a policy, and leaves nothing behind; `in_turn`, also those
                from a third argument on.
            fewest: How many rows it can do with; it is run with twice as many too.
            in_turn: Whether workers may take turns in drawing from the host's streams, and count rows that are routed.
            may_permute: See `draws_of`.
            repeat: Whether all rows follow each other once for each entry that a row has.

        Raises:
            UnsharedDraw: It cannot be told which numbers of PyTorch's stream belong to which row.
        """
        if self.stream is None and self.host is None:
            return Draws()
        drawing = self.begin(device)
        coins = Coins()
        found = [self._compare_draws(forward, fewest, coins, in_turn, may_permute)]
        if drawing.moved_host() or coins.found:  # a number of one of the streams may decide which others are drawn
            for seed in range(NUM_OTHER_STREAMS):
                stream = None if self.stream is None else _seeded_stream(seed)
                other = replace(self, host=seeded_state_of_host(seed), stream=stream)
                found.append(other._compare_draws(forward, fewest, Coins(), in_turn, may_permute))
        in_order = found[0].stream
        others = dict.fromkeys(itertools.chain(*(draws.stream for draws in found[1:])))
        of_host = {block.place: block for block in itertools.chain(*(draws.host for draws in found))}
        of_stream = (*in_order, *(draw for draw in others if draw not in in_order))
        return Draws(
            repeated(of_stream) if repeat else of_stream, tuple(of_host.values()), any(draw.site for draw in of_stream)
        )

    def _compare_draws(
        self, forward: Callable[..., object], fewest: int, coins: Coins, in_turn: bool, may_permute: bool
    ) -> Draws:
        drawn: list[Sequence[Drawn]] = []
        of_host = []
        for rows in (fewest, 2 * fewest):
            recorder = None if self.stream is None else DrawRecorder(coins)
            with recorder or nullcontext(), HostDrawRecorder() as host_recorder:
                forward(self, rows)
            drawn.append([] if recorder is None else recorder.drawn)
            of_host.append(host_recorder.drawn)
            if not drawn[0] and not of_host[0]:
                return Draws()
            coins.again()
        second = self._drawn_by_second(forward, fewest) if in_turn and drawn[0] else None
        of_stream = draws_of(drawn[0], drawn[1], second, may_route=in_turn, may_permute=may_permute)
        return Draws(of_stream, row_draws_of(of_host[0], of_host[1], fewest, in_turn=in_turn))

    def _drawn_by_second(self, forward: Callable[..., object], fewest: int) -> Sequence[Drawn]:
        """Returns what other rows draw, to recognize routed rows: two rows may draw equally often by chance."""
        with DrawRecorder() as recorder, HostDrawRecorder():
            forward(self, fewest, fewest)
        return recorder.drawn


class Drawing:
    """The random numbers of a forward that has begun.

    Args:
        shared: Draws this worker's part of the batch's numbers; None where PyTorch draws as usual.
        host: The same for Python and NumPy, where they draw for each row in turn.
    """

    def __init__(self, shared: SharedDraws | None = None, host: SharedHostDraws | None = None) -> None:
        self._shared, self._shared_host = shared, host
        self._counts: WorkerCounts | None = None
        self._stream, self._host = _stream_position(), host_position()

    def take_turns(self, turns: Callable[[], Turns], gathering: type[Any] | None) -> Callable[[], None] | None:
        """Has the forward draw in turn with other workers, if it draws for rows from the host's streams.

        Args:
            turns: Returns the turns.
            gathering: The class of modules in which workers wait for each other; None if the model has none.

        Returns:
            What ends a turn before workers wait for each other elsewhere; None if there will be none.
        """
        if self._shared_host is None:
            return None
        self._shared_host.turns, self._shared_host.gathering = turns(), gathering
        return self._shared_host.end_early

    def count_together(self, counts: WorkerCounts) -> None:
        """Has workers exchange for how many routed rows they draw."""
        if self._shared is not None:
            self._shared.counts = self._counts = counts

    def forward(self) -> AbstractContextManager[Any]:
        """Returns what has to be active during the forward."""
        if self._shared_host is None and self._counts is None:
            return self._shared or nullcontext()
        all_of_them = ExitStack()
        if self._shared_host is not None:
            all_of_them.enter_context(self._shared_host)
        if self._counts is not None:
            all_of_them.enter_context(self._counts.active())
        if self._shared is not None:
            all_of_them.enter_context(self._shared)
        return all_of_them

    def end(self) -> None:
        """The forward is over on all workers.

        Raises:
            ExactnessError: It drew less often than the forwards in which its draws were found.
        """
        if self._shared is not None:
            self._shared.end()

    def backward(self) -> AbstractContextManager[Any]:
        """Returns what has to be active while blocks may be computed again, with the random numbers they had."""
        both = ExitStack()
        if self._shared is not None:
            both.enter_context(self._shared.again())
        if self._shared_host is not None:
            both.enter_context(self._shared_host.again())
        return both

    def moved_host(self) -> bool:
        """Says whether anything was drawn from the host's streams since the forward began."""
        return self._host != host_position()

    def moved(self) -> bool:
        """Says whether anything was drawn: from the host's streams, PyTorch's on the CPU, a generator of the model."""
        has_shared = self._shared is not None and self._shared.has_drawn()
        return has_shared or self.moved_host() or self._stream != _stream_position()


def current_streams() -> Streams:
    """Returns where the CPU's stream and the host's are, for the script to go on from."""
    return Streams(state_of_stream(), state_of_host())


@contextmanager
def streams_untouched(device: torch.device | None) -> Iterator[None]:
    """Puts all streams back after the block: PyTorch's on the CPU and on `device`, and the host's."""
    with torch.random.fork_rng(devices=[] if device is None else [device]), host_untouched():
        yield


class HostReplay:
    """Where the host's streams are now, for a block that is computed again. PyTorch's `checkpoint` repeats its own."""

    def __init__(self) -> None:
        self._state = state_of_host()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the host's streams go on from there; afterwards they are where they were before the block."""
        with host_untouched():
            set_state_of_host(self._state)
            yield


class OwnStream:
    """This rank's own stream, drawn from as soon as this is made, with the common one put aside.

    See [Note: random numbers of a region].

    Args:
        rank: This rank's place on the tensor axis.
        device: Where the region computes.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            number, self._aside = _number_of_gpu(torch.cuda.get_rng_state(device))
            torch.cuda.manual_seed((number + rank) % 2**63)
        else:
            number = int(torch.randint(2**62, (), generator=torch.default_generator))
            self._aside = torch.default_generator.get_state()
            _seed(number + rank)

    def swap(self) -> None:
        """Goes on with the stream that was put aside, and puts the present one aside."""
        if self._device.type == "cuda":
            aside, self._aside = self._aside, torch.cuda.get_rng_state(self._device)
            torch.cuda.set_rng_state(aside, self._device)
        else:
            aside, self._aside = self._aside, torch.default_generator.get_state()
            torch.default_generator.set_state(aside)


def _seed(number: int) -> None:
    # Not `torch.manual_seed`: it also asks every back end that is not there, which takes longer than a small step.
    torch.default_generator.manual_seed(number % 2**63)


def _number_of_gpu(state: Tensor) -> tuple[int, Tensor]:
    """Returns a number drawn from a GPU's stream, without waiting for the GPU, and the state after that.

    The state is a seed and an offset, of 64 bits each; offsets are multiples of four.
    """
    number = int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest(), "little")
    after = state.clone()
    after.view(torch.int64)[1] += 4
    return number, after


def _seeded_stream(seed: int) -> Tensor:
    """Returns where the CPU's stream is after ``torch.manual_seed(seed)``."""
    return torch.Generator().manual_seed(seed).get_state()


def _stream_fingerprint() -> int:
    """Returns a hash below 2^16 of the position of the CPU's stream."""
    return zlib.crc32(_stream_position()) % 2**16


def _fingerprint_with_host() -> int:
    """Returns a hash below 2^16 of the positions of all streams, and of what was drawn for rows."""
    return zlib.crc32(repr((state_of_host(), SharedHostDraws.mark)).encode(), _stream_fingerprint()) % 2**16


def _stream_position() -> bytes:
    """Returns the state of the CPU's stream."""
    return torch.default_generator.get_state().numpy().tobytes()
