"""Measurements of a machine in place of a data sheet: exchanges by kind, and rates by the amount of data.

Decides how a figure between two measured ones is found. Must not know how anything was measured, models or plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["MeasuredCollective", "nearest", "rate_at"]


@dataclass(frozen=True)
class MeasuredCollective:
    """One kind of exchange.

    Attributes:
        kind: "sum", "gather" or "scatter" of what devices that share the batch exchange; "message" to a neighbour;
            "crossing_sum" or "crossing_split" of a layer on the tensor axis, forward and backward, the latter where it
            gathers positions before and scatters them behind.
        members: Devices of a group; all groups of so many exchanged at the same time.
        seconds: Bytes of the whole and seconds, rising.
    """

    kind: str
    members: int
    seconds: tuple[tuple[float, float], ...]

    def takes_s(self, num_bytes: float) -> float:
        """Returns how long so many bytes take: between two that were measured on a line, beyond as the last two say.

        Example:
            >>> MeasuredCollective("sum", 2, ((1e3, 1e-3), (1e6, 2e-3), (3e6, 4e-3))).takes_s(2e6)
            0.003
        """
        points = self.seconds
        if num_bytes <= points[0][0] or len(points) == 1:
            return points[0][1]
        place = next((here for here in range(1, len(points)) if num_bytes <= points[here][0]), len(points) - 1)
        (low, low_s), (high, high_s) = points[place - 1], points[place]
        return max(low_s + (num_bytes - low) * (high_s - low_s) / (high - low), low_s)


def nearest(exchanges: Iterable[MeasuredCollective], kind: str, members: int) -> MeasuredCollective | None:
    """Returns the exchange of a kind with the nearest number of members, None if that kind was not measured."""
    found = [one for one in exchanges if one.kind == kind]
    return min(found, key=lambda one: abs(math.log(one.members / members)), default=None)


def rate_at(rates: tuple[tuple[float, float], ...], amount: float) -> float:
    """Returns the rate for an amount, from pairs of amount and rate, rising; beyond them the nearest rate.

    Example:
        >>> rate_at(((1e6, 4e9), (1e8, 1e9)), 1e7)
        2000000000.0
    """
    if amount <= rates[0][0]:
        return rates[0][1]
    for (low, low_rate), (high, high_rate) in itertools.pairwise(rates):
        if amount <= high:
            return float(low_rate * (high_rate / low_rate) ** (math.log(amount / low) / math.log(high / low)))
    return rates[-1][1]
