"""What a search found, and which plan is preferred.

Decides the order of candidates. Must not know which plans are looked at, or how bytes and seconds are estimated.

[Note: simpler plans]
Differences below `TIE_MARGIN` are smaller than what the estimate can distinguish. Among plans within that of the
fastest, the simplest is chosen: fewest of shard, tensor and pipeline axes in use, then no recomputation, then the
plainest order, then fewest micro-batches; then time decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.no_fit_error import nothing_fits
from moreh_ap.planner.search.planning_task import Task

__all__ = ["TIE_MARGIN", "Ranking", "rank"]

TIE_MARGIN = 0.02
"""Fraction of a step's time that the estimate cannot distinguish. A choice of ours; the estimate's own error against
measured runs is larger (`docs/planner.md`), but much of it is common to all plans of a model."""


@dataclass(frozen=True)
class Ranking:
    """The result of a search.

    Attributes:
        task: What was searched for.
        candidates: Plans looked at, best first, those that do not fit last.
        num_fitting: How many fit.
        skipped: How many plans were settled without a closer look, by reason.
        prepare_s: Seconds spent finding plans and estimating their memory.
        select_s: Seconds spent estimating the time of those that fit, and ranking them.
    """

    task: Task
    candidates: tuple[Candidate, ...]
    num_fitting: int
    skipped: Mapping[str, int]
    prepare_s: float
    select_s: float

    @property
    def seconds(self) -> float:
        """Seconds that the search took."""
        return self.prepare_s + self.select_s

    @property
    def counts(self) -> tuple[int, int]:
        """How many plans were looked at, and how many of them fit."""
        return len(self.candidates), self.num_fitting

    @property
    def best(self) -> Candidate:
        """The candidate to use.

        Raises:
            PlanError: None fits; the error says what would.
        """
        if self.num_fitting:
            return self.candidates[0]
        raise nothing_fits(self.task, self.candidates)

    @property
    def fastest(self) -> Candidate:
        """The candidate whose predicted step is shortest; `best` may be a simpler one that is hardly slower.

        Raises:
            PlanError: None fits.
        """
        if not self.num_fitting:
            return self.best
        return min(self.candidates[: self.num_fitting], key=_seconds_of)


def rank(candidates: Iterable[Candidate]) -> tuple[tuple[Candidate, ...], int]:
    """Returns the candidates, best first, those that do not fit last, and how many fit. See [Note: simpler plans]."""
    found = list(candidates)
    fitting = [candidate for candidate in found if candidate.fits]
    others = sorted((candidate for candidate in found if not candidate.fits), key=_bytes_of)
    return (*_ranked(fitting), *others), len(fitting)


def _ranked(fitting: list[Candidate]) -> list[Candidate]:
    if not fitting:
        return []
    by_time = sorted(fitting, key=_seconds_of)
    limit_s = by_time[0].seconds * (1 + TIE_MARGIN)
    close = sum(candidate.seconds <= limit_s for candidate in by_time)
    return sorted(by_time[:close], key=_complexity) + by_time[close:]


def _seconds_of(candidate: Candidate) -> float:
    return candidate.seconds


def _bytes_of(candidate: Candidate) -> float:
    return candidate.memory.reserved_bytes


def _complexity(candidate: Candidate) -> tuple[float, ...]:
    plan = candidate.plan
    return (
        sum(size > 1 for size in (plan.shard, plan.tensor, plan.pipeline)),
        plan.offload != "none",
        plan.recompute != "none",
        plan.schedule not in ("1f1b", "gpipe"),
        len(plan.layers) > 0,
        plan.stages_per_device,
        plan.micro_batches,
        candidate.seconds,
    )
