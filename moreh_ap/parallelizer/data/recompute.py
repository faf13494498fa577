"""Recomputes the activations of blocks in the backward instead of keeping them from the forward.

Decides what of a block is kept and under which surroundings it runs again. Must not know plans, other axes of the mesh,
or how blocks were found.

[Note: the same surroundings]
A worker's forward runs under torch function modes: CUDA devices mean this worker's (`placement.py`), means are shares
of the global batch (`loss_reduction.py`), dropout may be off (`dry_run.py`). The backward runs outside of them. So a
block remembers the modes of its forward and runs again under the same ones; the denominators that the forward summed
over workers are used once more, so nothing is communicated for them and nothing can differ. Copies of parameters in
another dtype are those of the first run (`computing_copies.py`). Autocast and random numbers of PyTorch are put back by
`torch.utils.checkpoint`, those of Python and NumPy by `HostReplay`.

[Note: run twice, counted once]
A forward may change things: running statistics in buffers, a key-value cache among its arguments. Buffers are put back
after the second run. Containers that pytrees know are taken apart before the first run and put together afresh for the
second, which so gets a cache as it was. A counter in an attribute counts twice: attributes are not restored.

[Note: the order with FSDP2]
The block's `forward` is replaced, not the block: names of parameters stay, and hooks on the block, FSDP2's among them,
stay outside of what runs twice. So a block's parameters are gathered once for its backward, before it runs again.
Source: torchtitan, `torchtitan/models/llama3/parallelize.py` (checkpoint first, then `fully_shard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from moreh_ap.parallelizer.data.selective_recompute import KeptResults
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.precision.computing_copies import in_place_again
from moreh_ap.parallelizer.rng.policy import HostReplay


def apply_recompute(blocks: Sequence[nn.Module], recompute: str | int, *, stop_early: bool = False) -> None:
    """Makes blocks compute their activations again in the backward. Applied before `fully_shard`.

    Args:
        blocks: This worker's repeated blocks, in order.
        recompute: "full" keeps a block's inputs only, "selective" also its matrix products and attention results; a
            number means so many of the first blocks in full; "none" changes nothing.
        stop_early: Whether a block's second run ends where nothing more is needed, which saves its last product. Not
            for blocks in which something has to be closed at the end, such as a region of tensor parallelism.
    """
    if recompute == "none":
        return
    count = recompute if isinstance(recompute, int) else len(blocks)
    for block in blocks[:count]:
        object.__setattr__(block, "forward", RecomputedForward(block, recompute == "selective", stop_early))


class RecomputedForward:
    """A block's forward whose activations are computed again in the backward.

    Args:
        block: The block.
        selective: Whether expensive results are kept.
        stop_early: See `apply_recompute`.

    Attributes:
        replaces: The forward that the block itself had before, None where it had that of its class.
    """

    def __init__(self, block: nn.Module, selective: bool, stop_early: bool) -> None:
        self._block, self._forward = block, block.forward
        self.replaces = vars(block).get("forward")
        self.selective, self._stop_early = selective, stop_early
        self.__wrapped__ = block.forward  # for those who look at the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        given = [(args, kwargs)]

        def run(*leaves: Any) -> Any:
            now_args, now_kwargs = given.pop() if given else tree_unflatten(leaves, spec)
            return self._forward(*now_args, **now_kwargs)

        # All leaves are positional: `checkpoint` puts back the random numbers of devices that it finds there.
        return checkpoint(run, *leaves, use_reentrant=False, context_fn=self._contexts, early_stop=self._stop_early)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Returns what the first run has around it, and what every later one has."""
        surroundings = _Surroundings(self._block, self.selective)
        return surroundings.first_run(), _EachTime(surroundings.later_run)


class _Surroundings:
    """What a block's first run leaves for the later ones. See [Note: the same surroundings].

    Args:
        block: The block.
        selective: Whether expensive results are kept.
    """

    def __init__(self, block: nn.Module, selective: bool) -> None:
        self._block = block
        self._modes = _get_current_function_mode_stack()
        self._again = [mode.to_replay() if isinstance(mode, GlobalReduction) else None for mode in self._modes]
        self._host = HostReplay()
        self._sites: list[slice] = []
        self._kept = KeptResults() if selective else None
        self._computing_again = in_place_again(block)

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Inside, the block runs and what later runs need is noted."""
        starts = [_num_sites(mode) for mode in self._modes]
        if self._kept is None:
            yield
        else:
            with self._kept.collecting():
                yield
        self._sites = [slice(start, _num_sites(mode)) for start, mode in zip(starts, self._modes, strict=True)]

    @contextmanager
    def later_run(self) -> Iterator[None]:
        """Inside, the block runs as it did the first time."""
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._block.buffers()]
        modes = [
            mode if replay is None else replay(sites)
            for mode, replay, sites in zip(self._modes, self._again, self._sites, strict=True)
        ]
        try:
            with self._host.again(), function_modes(modes), self._computing_again():
                if self._kept is None:
                    yield
                else:
                    with self._kept.giving_back():
                        yield
        finally:
            for buffer, value in buffers:
                buffer.data.copy_(value)  # `.data`: a graph that has kept the buffer is not told of the change


class _EachTime:
    """A context manager that may be entered several times: each time `make` makes the one to enter."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


@contextmanager
def function_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Inside, exactly these torch function modes are active, the last one innermost."""
    outside = _get_current_function_mode_stack()
    for _ in outside:
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()
        for mode in outside:
            _push_mode(mode)


def _num_sites(mode: object) -> int:
    return len(mode.global_denominators) if isinstance(mode, GlobalReduction) else 0
