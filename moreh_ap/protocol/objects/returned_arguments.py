"""Forwards that return an argument in which they changed something: ``batch["logits"] = ...; return batch``.

The worker's argument is a copy. It says which one its forward returned, and the script's own object takes over what is
in the result, as if it had been changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from moreh_ap.protocol.pytree import is_taken_apart_as_whole

Place = int | str
"""Which argument: its position, or its keyword."""


def place_of(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Place | None:
    """Returns which argument `result` is, if it is one that can be changed; None if it is none of them."""
    if result is None or isinstance(result, (Tensor, tuple)) or is_taken_apart_as_whole(type(result)):
        return None
    for position, given in enumerate(args):
        if given is result:
            return position
    return next((name for name, given in kwargs.items() if given is result), None)


def hand_back(place: Place, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Returns the script's argument at `place`, now with what is in `result`."""
    given = args[place] if isinstance(place, int) else kwargs[place]
    if type(given) is not type(result):
        return result
    if isinstance(given, dict):
        given.clear()
        given.update(result)
    elif isinstance(given, list):
        given[:] = result
    if hasattr(given, "__dict__"):
        vars(given).clear()
        vars(given).update(vars(result))
    return given
