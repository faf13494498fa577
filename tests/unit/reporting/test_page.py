"""The page of a report: its figures, its charts, and that it needs nothing from a network."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from moreh_ap.reporting import charts, page
from moreh_ap.reporting.run_record import PlanFigures, PlannedModel, RunRecord, Step


@pytest.fixture
def record():
    model = PlannedModel(
        "Llama",
        PlanFigures("shard=2", 0.5, 3 * 2**30),
        "3 of 5 plans fit",
        [PlanFigures("replicate=2", 0.75, 4 * 2**30)],
        {"parameters": 2.0 * 2**30, "logits": 2.0**30},
        8.0 * 2**30,
        8,
    )
    steps = [Step(None if number == 0 else 0.5, 8, 1024, 3.0 - number / 100) for number in range(100)]
    return RunRecord(
        "train.py <lr>",
        "2026-11-25 10:00:00",
        "2026-11-25 11:00:00",
        "finished",
        devices=[{"name": "H100", "num_bytes": 80 * 2**30}] * 2,
        peak_bytes=[3 * 2**30, 2 * 2**30],
        models=[model],
        steps=steps,
        slow=[{"text": "every device computes the whole batch", "place": "train.py:12"}],
        warnings=[{"category": "TrialWarning", "text": "odd", "place": "train.py:13"}],
    )


class Text(HTMLParser):
    """The words of a page, in order, and whether its tags are closed in their order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words, self.is_style, self.open = [], False, []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.is_style = tag == "style"
        if tag not in ("meta", "polyline", "line", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        self.is_style = False
        if tag not in ("polyline", "line"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.is_style:
            self.words += data.split()


def test_the_page_has_the_figures(record):
    html = page.make(record)
    found = Text(html)
    assert not found.open, "every tag is closed"
    text = " ".join(found.words)
    assert "100 steps 500 ms a step, mean 2,048 tokens/s 2 devices : H100" in text.replace("devices:", "devices :")
    assert "The next best, replicate=2 , is predicted to take 1.50 times as long." in text
    assert "a step 500 ms 500 ms the fullest device 3.00 GiB 3.00 GiB" in text
    assert "train.py:12 every device computes the whole batch" in text
    assert "train.py:13 TrialWarning: odd" in text
    assert "train.py <lr>" in text and "<lr>" not in html, "what comes from the script is escaped"


def test_losses_of_workers_are_counted_on_the_page(record):
    assert "survived" not in page.make(record)
    record.losses_survived = 1
    assert "1 loss of a worker survived" in " ".join(Text(page.make(record)).words)
    record.losses_survived = 2
    assert "2 losses of workers survived" in " ".join(Text(page.make(record)).words)


def test_models_alike_are_named_once(record):
    record.models *= 2
    text = " ".join(Text(page.make(record)).words)
    assert text.count("3 of 5 plans fit") == 1 and "Llama (2 models): shard=2" in text


def test_long_plans_break_behind_commas_and_small_sizes_are_legible(record):
    chosen = PlanFigures("shard=2,micro_batches=4", 0.5, 3 * 2**20)
    record.models = [replace(record.models[0], chosen=chosen, others=[PlanFigures("tensor=2", 0.495, 2**30)])]
    html = page.make(record)
    assert "shard=2,<wbr>micro_batches=4" in html
    text = " ".join(Text(html).words)
    assert "the fullest device 3 MiB" in text
    assert "take 0.99 times as long, which is less than the estimate can tell apart" in text


def test_names_of_variables_break_between_their_words(record):
    record.variables = {"MOREH_NUM_DEVICES": "2"}
    assert "MOREH_<wbr>NUM_<wbr>DEVICES" in page.make(record)


def test_what_is_not_known_of_a_run_is_not_shown_as_nothing(record):
    record.devices, record.peak_bytes = [], []
    text = " ".join(Text(page.make(record)).words)
    assert "0 devices" not in text and "3.00 GiB not measured" in text
    assert "a run of ten steps or more shows its tenth one" in text


def test_the_page_loads_nothing(record):
    html = page.make(record)
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import", html)


def test_a_run_that_never_trained(record):
    text = " ".join(Text(page.make(RunRecord("train.py", "now"))).words)
    assert "0 steps" in text and "No model was given a plan" in text


def test_a_script_that_waits_every_tenth_step_has_even_times(record):
    times = [0.01 if number % 10 else 5.0 for number in range(200)]
    assert page.smoothed(times, 10)[9:] == pytest.approx([0.509] * 191)
    assert page.smoothed([None, 1.0, 3.0], 2) == [None, None, 2.0]


def test_points_of_a_chart_lie_in_it_and_ticks_are_round():
    chart = charts.line_chart([None, 2.0, 4.0, float("nan"), 3.0], level=7.0)
    points = [tuple(map(float, point.split(","))) for point in chart.points.split()]
    assert len(points) == 3
    assert points[0][0] < points[1][0] < points[2][0] <= charts.WIDTH
    assert points[1][1] < points[2][1] < points[0][1] < charts.HEIGHT
    assert 0 <= chart.level < points[1][1]
    assert [label for _, label in chart.up] == ["2", "3", "4", "5", "6", "7"]
    assert charts.line_chart([1.0]) is None
    assert charts.line_chart([5.0, 5.0]) is not None, "a line that does not rise"


def test_parts_of_a_bar_and_lanes_of_a_timeline():
    assert charts.shares({"a": 25.0, "b": 0.0, "c": 50.0}, 100.0) == [("a", 0.0, 25.0), ("c", 25.0, 50.0)]
    both = {"process": "worker 0", "lane": "commands"}
    spans = [
        {"name": "forward", "category": "command", "began_ms": 0.0, "ms": 5.0, **both},
        {"name": "step", "category": "command", "began_ms": 5.0, "ms": 15.0, **both},
    ]
    (lane,) = charts.lanes(spans)
    assert lane.name == "worker 0, commands"
    assert lane.spans[1] == (25.0, 75.0, "command", "step: 15.00 ms")
