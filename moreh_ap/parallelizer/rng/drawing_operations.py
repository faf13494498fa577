"""Which operations draw random numbers on the CPU, and of which shape.

Decides that from an operation and its arguments. Must not know rows, workers or streams.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def draws_numbers(func: Any, args: Any, kwargs: dict[str, Any], *, anywhere: bool = False) -> bool:
    """Says whether an operation draws on the CPU: from the common stream, or from a generator of the model, of which
    all workers have a copy in the same state; or, if `anywhere`, on whatever device.

    Fused attention is marked as one that draws, and does only with a probability above zero.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags or not (anywhere or _is_on_cpu(args, kwargs)):
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool((args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) > 0)


def with_one_row(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Returns the arguments of a dropout of no rows with one row in their place, None for anything else.

    PyTorch returns a tensor without entries as it is, and draws nothing: other workers may draw for their rows.
    """
    given = args[0] if args else None
    if "dropout" not in name or not isinstance(given, Tensor) or given.ndim == 0 or given.numel() or given.shape[0]:
        return None
    return (given.new_ones(1, *given.shape[1:]), *args[1:])


def with_both_ends(name: str, args: tuple[Any, ...], drawn: Tensor) -> Tensor:
    """Returns coins, or numbers from 0 to 1, that are as small and as large as can be, in turn, and still differ.

    Those of other operations are returned as they are: they show.

    Args:
        name: The operation.
        args: Its positional arguments.
        drawn: What it gave.
    """
    odd = (torch.arange(drawn.numel()) % 2).view(drawn.shape).to(drawn.dtype)
    if name.startswith("bernoulli"):
        return odd
    is_fraction = name in ("rand", "rand_like") or (name == "uniform_" and args[1:] in ((), (0, 1)))
    return odd * (1 - 1e-5) + 1e-5 * drawn if is_fraction else drawn


def _is_on_cpu(args: Any, kwargs: dict[str, Any]) -> bool:
    named = kwargs.get("device")
    places = [torch.device(named)] if named is not None else [arg.device for arg in args if isinstance(arg, Tensor)]
    return not places or places[0].type == "cpu"


def shape_drawn(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Returns the shape of what an operation draws."""
    place = place_of_size(func)
    if place is not None:
        return tuple(args[place]) if place < len(args) else tuple(kwargs["size"])
    if func._opname == "randperm":
        return (args[0],)
    if func._opname == "multinomial":
        return (*args[0].shape[:-1], args[1])
    return torch.broadcast_shapes(*(arg.shape for arg in args if isinstance(arg, Tensor)))


def place_of_size(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("size") if "size" in names else None
