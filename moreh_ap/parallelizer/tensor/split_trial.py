"""Tries on one device, with random weights, whether a module computes the same when it is split.

Decides whether a guess about a module's structure is right. Must not know what was guessed or how it is carried out.

Every rank does the same with numbers of its own generator, so all come to the same conclusion without a word.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moreh_ap.parallelizer.tensor.crossing import Crossing

_LARGEST = 2**26
"""Elements of the parameters of a module that is tried (256 MiB): a larger one is taken for what its names say."""
_ROWS, _LENGTH = 2, 3


class _Partial(BaseException):
    """Leaves a forward with what the region's output layer gave."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


class _OneRank(Crossing):
    """The crossings of one rank of several that do not exist: the sum of all is given, or asked for."""

    _place: tuple[int, int, Tensor | None]

    def __init__(self, rank: int, size: int, total: Tensor | None = None) -> None:
        super().__init__(mesh=None)  # type: ignore[arg-type]
        object.__setattr__(self, "_place", (rank, size, total))

    rank = property(lambda self: self._place[0])  # type: ignore[assignment]
    size = property(lambda self: self._place[1])  # type: ignore[assignment]

    def enter(self, full: Tensor) -> Tensor:
        return full

    def leave(self, partial: Tensor) -> Tensor:
        total = self._place[2]
        if total is None:
            raise _Partial(partial)
        return total


def survives(
    container: nn.Module, split: Callable[[nn.Module, Crossing], object], degree: int, features: int
) -> bool | None:
    """Returns whether a module computes the same after `split`; None where it cannot be tried alone.

    Args:
        container: The module, on meta or with values; left as it is.
        split: Splits a copy for the rank of the given crossing.
        degree: Number of ranks.
        features: Features of the module's input.
    """
    if sum(p.numel() for p in container.parameters()) > _LARGEST:
        return None
    generator = torch.Generator().manual_seed(0)
    reference = copy.deepcopy(container).to_empty(device="cpu").float().eval()
    with torch.no_grad():
        for param in reference.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / max(param.shape[-1], 1) ** 0.5)
        for buffer in reference.buffers():
            buffer.fill_(1)
        hidden = torch.randn(_ROWS, _LENGTH, features, generator=generator)
        for extra in _arguments(container, generator):
            expected = _run(reference, hidden, extra)
            if isinstance(expected, Tensor):
                return _agrees(reference, split, degree, hidden, extra, expected)
    return None


def _agrees(
    reference: nn.Module,
    split: Callable[[nn.Module, Crossing], object],
    degree: int,
    hidden: Tensor,
    extra: dict[str, Any],
    expected: Tensor,
) -> bool:
    total: Tensor | None = None
    for rank in range(degree):
        partial_sum = _run_split(reference, split, _OneRank(rank, degree), hidden, extra)
        if not isinstance(partial_sum, _Partial) or (total is not None and partial_sum.value.shape != total.shape):
            return False
        total = partial_sum.value if total is None else total + partial_sum.value
    result = _run_split(reference, split, _OneRank(degree - 1, degree, total), hidden, extra)
    return (
        isinstance(result, Tensor)
        and result.shape == expected.shape
        and torch.allclose(result, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    )


def _run_split(
    reference: nn.Module,
    split: Callable[[nn.Module, Crossing], object],
    crossing: Crossing,
    hidden: Tensor,
    extra: dict[str, Any],
) -> Any:
    module = copy.deepcopy(reference)
    split(module, crossing)
    try:
        return _run(module, hidden, extra)
    except _Partial as partial:
        return partial


def _run(module: nn.Module, hidden: Tensor, extra: dict[str, Any]) -> Any:
    """Returns the first tensor of the result, or the exception of a forward that cannot be split so."""
    try:
        result = module(hidden, **extra)
    except Exception as error:  # any error of a forward that was not written for such inputs
        return error
    return result[0] if isinstance(result, (tuple, list)) and len(result) else result


def _arguments(container: nn.Module, generator: torch.Generator) -> list[dict[str, Any]]:
    """Returns what may be given besides the hidden states: nothing, or rotary positions of any width that fits."""
    parameters = list(inspect.signature(type(container).forward).parameters.values())[1:]
    names = [p.name for p in parameters]
    needed = [p.name for p in parameters[1:] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    rest: dict[str, Any] = {name: None for name in needed if name != "position_embeddings"}
    if "position_ids" in names:
        rest["position_ids"] = torch.arange(_LENGTH).expand(_ROWS, -1)
    if "position_embeddings" not in names:
        return [rest]
    config = getattr(container, "config", None)
    widths = {getattr(container, name, None) for name in ("head_dim", "head_size", "rotary_ndims", "rotary_dim")}
    widths |= {getattr(config, "head_dim", None)}
    found = [rest]
    for width in sorted(w for w in widths if isinstance(w, int)):
        rotary = tuple(torch.randn(1, _LENGTH, width, generator=generator) for _ in range(2))
        found.append({**rest, "position_embeddings": rotary})
    return found
