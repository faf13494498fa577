"""The page of a report: one HTML file that needs no network.

Decides which figures the page has and in which units. Its words and its looks are in `page.html.jinja`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from importlib import resources

from moreh_ap.reporting import charts
from moreh_ap.reporting.run_record import PlanFigures, PlannedModel, RunRecord, Step

_SETTLED_AFTER = 6
"""The first steps build, compile and compare; a run that has more is judged by the later ones."""


def make(record: RunRecord) -> str:
    """Returns the page's HTML."""
    import jinja2  # which scripts without a report do without

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(gib=_gib, duration=_duration)
    template = environment.from_string(resources.files(__package__).joinpath("page.html.jinja").read_text("utf-8"))
    settled = settled_steps(record.steps)
    model = record.models[0] if record.models else None
    seconds = mean_seconds(settled)
    window = _window(len(record.steps))
    means = smoothed([step.seconds for step in record.steps], window)
    amounts = smoothed([float(step.tokens) for step in record.steps], window)
    next_best = next_plan(record)
    return template.render(
        run=record,
        model=model,
        models=_counted(record.models),
        seconds=seconds,
        rows_per_s=_rate([step.rows for step in settled], settled),
        tokens_per_s=_rate([step.tokens for step in settled], settled),
        next_best=next_best,
        next_ratio=None if model is None or next_best is None else next_best.seconds / model.chosen.seconds,
        seconds_chart=charts.line_chart(means, None if model is None else model.chosen.seconds),
        tokens_chart=charts.line_chart(
            [tokens / mean if tokens and mean else None for tokens, mean in zip(amounts, means)]
        ),
        window=window,
        loss_chart=charts.line_chart([step.loss for step in record.steps]),
        lanes=charts.lanes(record.timeline),
        shares=charts.shares,
        width=charts.WIDTH,
        height=charts.HEIGHT,
    )


def settled_steps(steps: list[Step]) -> list[Step]:
    """Returns the steps that a run is judged by."""
    return steps[_SETTLED_AFTER:] if len(steps) > _SETTLED_AFTER else steps[1:]


def mean_seconds(steps: list[Step]) -> float | None:
    """Returns the mean time of steps; None if none was timed.

    A script that does not read a loss sends several steps ahead and then waits for all of them: only their mean says
    what a step takes.
    """
    known = [step.seconds for step in steps if step.seconds is not None]
    return statistics.fmean(known) if known else None


def smoothed(values: Sequence[float | None], window: int) -> list[float | None]:
    """Returns the mean of each value and those before it, `window` together; None where fewer are known."""
    found: list[float | None] = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(end - window, 0) : end] if value is not None]
        found.append(statistics.fmean(known) if len(known) == window else None)
    return found


def next_plan(record: RunRecord) -> PlanFigures | None:
    """Returns the plan that would have been chosen next; None where the script gave the plan or there is no other."""
    return record.models[0].others[0] if record.models and record.models[0].others else None


def _counted(models: list[PlannedModel]) -> list[tuple[PlannedModel, int]]:
    """Returns each different model once, with how many are like it: a script may make one anew to go on from a file."""
    alike: dict[tuple[str, str, str], list[PlannedModel]] = {}
    for one in models:
        alike.setdefault((one.model, one.chosen.plan, one.reason), []).append(one)
    return [(same[0], len(same)) for same in alike.values()]


def _window(num_steps: int) -> int:
    """Returns of how many steps a chart shows the mean."""
    return 1 if num_steps < 20 else max(10, min(num_steps // 20, 50))


def _rate(amounts: list[int], steps: list[Step]) -> float | None:
    seconds = sum(step.seconds for step in steps if step.seconds is not None)
    return sum(amounts) / seconds if seconds and any(amounts) else None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 0.1 * 2**30 else f"{num_bytes / 2**20:.3g} MiB"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
