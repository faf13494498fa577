"""Batch normalisation of parts of a batch, each by itself, where workers have whole parts.

Decides which parts are whole, and what running statistics become. Must not know models, plans, or how a forward was
tried (`trial.joined_probe`).

[Note: one part after the other]
Ghost batch normalisation cuts a batch of 1,024 rows into eight parts, and each is normalised by its own statistics. A
worker that has four whole parts needs nothing of the others for that. Running statistics are updated by one part after
the other, over the whole batch: each makes ``r`` into ``(1 - momentum) * r + momentum * statistics``. So all parts of a
worker make it into ``kept * r + added``, and one device has what these give in the order of the workers.

[Note: how many parts]
How many there are follows from the number of rows, `ceil(rows / 128)`: of a few rows it is one, however many the
batch has. So a forward that asks how many rows it has, or cuts them, runs once on all rows of the batch, and once on
those of each worker, and the numbers of values of which statistics are taken are compared. What that shows is true of
batches of so many rows. If statistics are of all rows, it is true of fewer rows too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moreh_ap.parallelizer.loss.loss_reduction import call_site

Sizes = Mapping["Part", Sequence[int]]
"""Of how many values a channel each normalisation takes its statistics, in order."""


class Part(NamedTuple):
    """A normalisation of a model.

    Attributes:
        name: Its name, unique among the parts of a forward.
        mean: The name of the buffer with its running mean; "" without.
        variance: The same of its running variance.
    """

    name: str
    mean: str = ""
    variance: str = ""


def tensor_names(module: nn.Module) -> dict[int, str]:
    """Returns the names of parameters and buffers by the identity of the tensor."""
    return {id(tensor): name for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers())}


def part_of(given: Mapping[str, Any], names: Mapping[int, str]) -> Part:
    """Returns the normalisation that has such arguments of `torch.nn.functional.batch_norm`."""
    mean, variance, weight = (names.get(id(given[key]), "") for key in ("running_mean", "running_var", "weight"))
    return Part(mean or weight or f"line {call_site()}", mean, variance)


def whole_parts(batch: Sizes, workers: Sequence[Sizes | None]) -> tuple[Part, ...] | None:
    """Returns which normalisations take their statistics of parts of the batch that workers have whole.

    Args:
        batch: What was noted of all rows of the batch.
        workers: What was noted of the rows of each worker; None: nothing, since they raised an error.

    Returns:
        The normalisations; those that are left out take the statistics of all rows. None: some do neither.
    """
    found = []
    for part, sizes in batch.items():
        own = [worker.get(part, ()) for worker in workers if worker is not None]
        is_joined = all(len(one) == len(sizes) for one in own)
        if len(own) == len(workers) and is_joined and list(map(sum, zip(*own, strict=True))) == list(sizes):
            continue
        if len(own) < len(workers) or list(itertools.chain(*own)) != list(sizes):
            return None
        found.append(part)
    has_others = any(part not in batch for worker in workers for part in worker or ())
    return None if has_others else tuple(sorted(found))


class BatchParts:
    """Normalisations of parts of a batch in one forward, and what becomes of their running statistics.

    Args:
        parts: The normalisations; the same on every worker.
        module: The model, before the forward.
    """

    def __init__(self, parts: Sequence[Part], module: nn.Module) -> None:
        buffers = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._names = tensor_names(module)
        self._calls = dict.fromkeys(parts, 0)
        self._kept = dict.fromkeys(parts, 1.0)
        self._running = {part: [buffers[name] for name in part[1:] if name] for part in parts}
        self._before = {part: [_copy(one) for one in running] for part, running in self._running.items()}
        counters = {part: f"{part.mean.rpartition('.')[0]}.num_batches_tracked".lstrip(".") for part in parts}
        self._counters = {part: buffers[name] for part, name in counters.items() if name in buffers}

    def take(self, given: Mapping[str, Any]) -> bool:
        """Says whether a normalisation that is about to run takes the statistics of a part of the batch.

        Args:
            given: The arguments of `torch.nn.functional.batch_norm`, by name.
        """
        part = part_of(given, self._names)
        if part not in self._calls:
            return False
        self._calls[part] += 1
        self._kept[part] *= 1 - given["momentum"]
        return True

    @torch.no_grad()
    def put_together(self, gather: Callable[[Tensor], Tensor]) -> None:
        """Makes running statistics what they are on one device. See [Note: one part after the other].

        Args:
            gather: Returns the tensors of all workers, one a row, in rank order. A collective.
        """
        for part, calls in self._calls.items():
            running, before = self._running[part], self._before[part]
            numbers = torch.tensor([calls, self._kept[part]], dtype=torch.float64)
            after = [one.detach().double().flatten() for one in running]
            device = after[0].device if after else numbers.device
            all_WN = gather(torch.cat([numbers.to(device), *after]))
            calls_W, kept_W, *_ = all_WN.unbind(1)
            position = 2
            for buffer, first in zip(running, before, strict=True):
                own_WC = all_WN[:, position : position + buffer.numel()].reshape(-1, *buffer.shape)
                position += buffer.numel()
                buffer.data.copy_(applied_in_turn(first, own_WC, kept_W))  # `.data`: a graph may have kept the buffer
            counter = self._counters.get(part)
            if counter is not None:
                counter.data.add_((calls_W.sum() - calls).to(counter.device, counter.dtype))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64, copy=True)


def applied_in_turn(first: Tensor, own_WC: Tensor, kept_W: Tensor) -> Tensor:
    """Returns a running statistic after the parts of all workers.

    Args:
        first: What it was before, of shape (C,), in float64.
        own_WC: What each worker's parts alone have made of that.
        kept_W: How much of what it was is still in that.
    """
    found = first
    for own_C, kept in zip(own_WC, kept_W, strict=True):
        found = kept * found + (own_C - kept * first)
    return found
