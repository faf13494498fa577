"""Says in words and numbers why a plan was chosen, and what the others lack.

Decides which comparisons explain a choice. Must not know how text is shown: it returns sentences, and labels
with numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.footprint import MemoryEstimate
from moreh_ap.planner.cost.step_time import StepEstimate
from moreh_ap.planner.search.plan_search import INDISTINCT, Candidate, Ranking

__all__ = ["differences", "left_out", "memory_parts", "prediction", "reason", "sentences", "time_parts"]

_MEANS: tuple[tuple[str, Callable[[Plan], bool]], ...] = (
    ("sharded parameters", lambda plan: plan.shard > 1),
    ("a tensor axis", lambda plan: plan.tensor > 1),
    ("a pipeline", lambda plan: plan.pipeline > 1),
    ("recomputation", lambda plan: plan.recompute != "none"),
)
"""What a plan may use to make a model fit, as sentences call it."""


def memory_parts(memory: MemoryEstimate) -> list[tuple[str, float]]:
    """Returns what the fullest device holds, label and bytes, in the order of a bar."""
    return [
        ("parameters", memory.parameter_bytes),
        ("gradients", memory.gradient_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("activations", memory.activation_bytes),
        ("logits", memory.logit_bytes),
        ("temporary", memory.temporary_bytes),
        ("fragmentation", memory.fragmentation_bytes),
    ]


def time_parts(step: StepEstimate) -> list[tuple[str, float, float]]:
    """Returns where the time of a step goes: label, seconds that count, seconds hidden behind computation."""
    return [
        ("forward", step.forward_s, 0.0),
        ("backward", step.backward_s, 0.0),
        ("recomputation", step.recompute_s, 0.0),
        ("host", step.host_s, 0.0),
        ("tensor axis", step.tensor_s, step.tensor_hidden_s),
        ("data axes", step.data_s, step.data_hidden_s),
        ("pipeline messages", step.pipeline_s, step.pipeline_hidden_s),
        ("bubble", step.bubble_s, 0.0),
        ("optimizer", step.optimizer_s, 0.0),
        ("fixed", step.fixed_s, 0.0),
    ]


def reason(ranking: Ranking) -> str:
    """Returns one sentence with the numbers that decided, for a log.

    Raises:
        PlanError: No plan fits.
    """
    best, fastest = ranking.best, ranking.fastest
    looked_at, fitting = ranking.counts
    text = f"{fitting} of {looked_at} plans fit in {_gib(best.usable_bytes)} GiB a device, "
    if best is fastest:
        text += "this is the fastest"
    else:
        text += f"this is the simplest within {INDISTINCT:.0%} of the fastest"
    return f"{text}: {prediction(best)}"


def prediction(candidate: Candidate) -> str:
    """Returns what is predicted for a timed candidate, in short."""
    return f"{_seconds(candidate)} a step, {_gib(candidate.memory.reserved_bytes)} GiB"


def sentences(ranking: Ranking) -> list[str]:
    """Returns why the best plan is the best: what the fastest would gain, and what each means costs or saves.

    Raises:
        PlanError: No plan fits.
    """
    best, fastest = ranking.best, ranking.fastest
    said = [reason(ranking)[0].upper() + reason(ranking)[1:] + "."]
    if fastest is not best:
        gain = 1 - _total(fastest) / _total(best)
        said.append(f"The fastest, {fastest.plan}, is {gain:.1%} faster: less than the estimate can tell apart.")
    fitting = ranking.candidates[: ranking.num_fitting]
    for name, uses in _MEANS:
        others = [candidate for candidate in fitting if uses(candidate.plan) != uses(best.plan)]
        word = "Without" if uses(best.plan) else "With"
        if others:
            other = min(others, key=_total)
            said.append(f"{word} {name}: {_compared(other, best)} with {other.plan}.")
        elif uses(best.plan):
            said.append(_why_needed(ranking, name, uses))
    parts = sorted(time_parts(_step(best)), key=lambda part: -part[1])[:3]
    shares = ", ".join(f"{label} {seconds / _total(best):.0%}" for label, seconds, _ in parts)
    said.append(f"Most of the step is {shares}.")
    return said


def left_out(ranking: Ranking) -> list[str]:
    """Returns how many plans were settled without a closer look, a sentence for each reason."""
    counted = sorted(ranking.left_out.items(), key=lambda pair: -pair[1])
    return [f"{count} more not looked at: each {why}." for why, count in counted if count]


def _why_needed(ranking: Ranking, name: str, uses: Callable[[Plan], bool]) -> str:
    """Returns why no plan without one of the means fits."""
    without = [candidate for candidate in ranking.candidates if not uses(candidate.plan)]
    if not without:
        return f"Every plan that the options leave has {name}."
    least = min(without, key=lambda candidate: candidate.memory.reserved_bytes)
    return f"Without {name} nothing fits: {least.plan} {least.rejected}."


def _compared(other: Candidate, best: Candidate) -> str:
    ratio = _total(other) / _total(best) - 1
    return "the same time" if abs(ratio) < 0.0005 else f"{abs(ratio):.1%} {'slower' if ratio > 0 else 'faster'}"


def differences(first: Candidate, second: Candidate) -> Iterator[str]:
    """Yields what makes the second plan slower or faster than the first, largest part first."""
    parts = zip(time_parts(_step(first)), time_parts(_step(second)))
    changes = [(label, after - before) for (label, before, _), (_, after, _) in parts]
    for label, change in sorted(changes, key=lambda pair: -abs(pair[1])):
        if abs(change) > 0.005 * _total(first):
            yield f"{label} {'+' if change > 0 else '-'}{abs(change):.3g} s"


def _step(candidate: Candidate) -> StepEstimate:
    assert candidate.step is not None
    return candidate.step


def _total(candidate: Candidate) -> float:
    return _step(candidate).total_s


def _seconds(candidate: Candidate) -> str:
    return f"{_total(candidate):.3g} s"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"
