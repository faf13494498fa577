"""The verified kinds of plans: which kinds of parallelism were found exact for which family of models.

Decides which kinds have to be verified for each family. Those that were are listed in `verified_kinds.json`, in which a
family is the qualified name of its class and transformers' `model_type`. Must not know how a plan is verified.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from moreh_ap.plan import Plan

__all__ = ["is_verified", "kinds_to_verify", "verified_kinds"]

_FILE = Path(__file__).with_name("verified_kinds.json")


def kinds_to_verify(plan: Plan) -> frozenset[str]:
    """Returns the kinds of parallelism in a plan that are exact only for models whose structure was understood.

    Replicas and shards are not among them: whether a batch may be split is checked at every kind of call anyway.

    Example:
        >>> sorted(kinds_to_verify(Plan(replicate=2, tensor=2)))
        ['tensor']
    """
    used = {"tensor": plan.tensor > 1, "sequence_parallel": plan.sequence_parallel, "pipeline": plan.pipeline > 1}
    return frozenset(kind for kind, is_used in used.items() if is_used)


def is_verified(family: str, plan: Plan) -> bool:
    """Returns whether every kind in the plan that has to be verified was, for the family."""
    return kinds_to_verify(plan) <= verified_kinds().get(family, frozenset())


@cache
def verified_kinds() -> dict[str, frozenset[str]]:
    """Returns the verified kinds of every family, as they are in the file."""
    return {family: frozenset(kinds) for family, kinds in json.loads(_FILE.read_text(encoding="utf-8")).items()}
