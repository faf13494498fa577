"""Why a plan was chosen, and what the others lack, in sentences: what `moreh-ap plan --explain` and `--compare` say.

Decides which comparisons explain a choice. Must not know how sentences are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moreh_ap.log import ranking_reason
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.step_estimate import StepEstimate
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.ranking import Ranking

_MEANS: tuple[tuple[str, Callable[[Plan], bool]], ...] = (
    ("sharded parameters", lambda plan: plan.shard > 1),
    ("a tensor axis", lambda plan: plan.tensor > 1),
    ("a pipeline", lambda plan: plan.pipeline > 1),
    ("recomputation", lambda plan: plan.recompute != "none"),
)
"""What a plan may use to make a model fit, as sentences call it."""


def sentences(ranking: Ranking) -> list[str]:
    """Returns why the best plan is the best: what the fastest would gain, and what each means costs or saves.

    Raises:
        PlanError: No plan fits.
    """
    best, fastest = ranking.best, ranking.fastest
    reason = ranking_reason(ranking)
    said = [reason[0].upper() + reason[1:] + "."]
    if fastest is not best:
        gain = 1 - fastest.seconds / best.seconds
        said.append(f"The fastest, {fastest.plan}, is {gain:.1%} faster: less than the estimate can tell apart.")
    fitting = ranking.candidates[: ranking.num_fitting]
    for name, uses in _MEANS:
        others = [candidate for candidate in fitting if uses(candidate.plan) != uses(best.plan)]
        word = "Without" if uses(best.plan) else "With"
        if others:
            other = min(others, key=lambda candidate: candidate.seconds)
            said.append(f"{word} {name}: {_compared(other, best)} with {other.plan}.")
        elif uses(best.plan):
            said.append(_why_needed(ranking, name, uses))
    largest = sorted(_step(best).components, key=lambda component: -component[1])[:3]
    fractions = ", ".join(f"{label} {seconds / best.seconds:.0%}" for label, seconds, _ in largest)
    said.append(f"Most of the step is {fractions}.")
    return said


def skipped_sentences(ranking: Ranking) -> list[str]:
    """Returns how many plans were settled without a closer look, a sentence for each reason."""
    counted = sorted(ranking.skipped.items(), key=lambda pair: -pair[1])
    return [f"{count} more not looked at: each {why}." for why, count in counted if count]


def differences(first: Candidate, second: Candidate) -> Iterator[str]:
    """Yields the components that make the second plan slower or faster than the first, the largest change first."""
    components = zip(_step(first).components, _step(second).components)
    changes = [(label, after - before) for (label, before, _), (_, after, _) in components]
    for label, change in sorted(changes, key=lambda pair: -abs(pair[1])):
        if abs(change) > 0.005 * first.seconds:
            yield f"{label} {'+' if change > 0 else '-'}{abs(change):.3g} s"


def _why_needed(ranking: Ranking, name: str, uses: Callable[[Plan], bool]) -> str:
    """Returns why no plan without one of the means fits."""
    without = [candidate for candidate in ranking.candidates if not uses(candidate.plan)]
    if not without:
        return f"Every plan that the options leave has {name}."
    least = min(without, key=lambda candidate: candidate.memory.reserved_bytes)
    return f"Without {name} nothing fits: {least.plan} {least.rejected}."


def _compared(other: Candidate, best: Candidate) -> str:
    ratio = other.seconds / best.seconds - 1
    return "the same time" if abs(ratio) < 0.0005 else f"{abs(ratio):.1%} {'slower' if ratio > 0 else 'faster'}"


def _step(candidate: Candidate) -> StepEstimate:
    assert candidate.step is not None
    return candidate.step
