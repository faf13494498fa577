"""Which kinds of plans are proven for which family of models, before anybody uses them.

Decides which kinds need a proof for each family, and where the proven ones are written: `proven.json`, in which a
family is the qualified name of its class and transformers' `model_type`. Must not know how a plan is proven.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from moreh_ap.plan import Plan

_FILE = Path(__file__).with_name("proven.json")


def kinds_to_prove(plan: Plan) -> frozenset[str]:
    """Returns the kinds of parallelism in a plan that are exact only for models whose structure was understood.

    Replicas and shards are not among them: whether a batch may be split is proven at every kind of call anyway.

    Example:
        >>> sorted(kinds_to_prove(Plan(replicate=2, tensor=2)))
        ['tensor']
    """
    used = {"tensor": plan.tensor > 1, "sequence_parallel": plan.sequence_parallel, "pipeline": plan.pipeline > 1}
    return frozenset(kind for kind, is_used in used.items() if is_used)


def is_proven(family: str, plan: Plan) -> bool:
    """Whether every kind in the plan that needs a proof has one for the family."""
    return kinds_to_prove(plan) <= proven_kinds().get(family, frozenset())


@cache
def proven_kinds() -> dict[str, frozenset[str]]:
    """Returns the proven kinds of every family, as they are in the file."""
    return {family: frozenset(kinds) for family, kinds in json.loads(_FILE.read_text(encoding="utf-8")).items()}
