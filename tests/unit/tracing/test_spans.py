"""Spans: which lane they lie on, what is left of them between two times, and how overlapping ones are placed."""

from __future__ import annotations

import threading

import pytest

from moreh_ap.tracing.spans import SCRIPT, Recorder, Span, on_lanes, this_clock, within


def span(began_ns, ended_ns, lane=SCRIPT):
    return Span("work", "call", began_ns, ended_ns, lane, {})


def test_a_span_ends_although_it_raises_and_inner_ones_end_first():
    recorder = Recorder()
    with pytest.raises(LookupError), recorder.span("outer", "call", where="train.py:3") as details:
        with recorder.span("inner", "wait"):
            pass
        details["bytes"] = 5
        raise LookupError
    inner, outer = recorder.spans
    assert (inner.name, outer.name, outer.details) == ("inner", "outer", {"where": "train.py:3", "bytes": 5})
    assert outer.began_ns <= inner.began_ns <= inner.ended_ns <= outer.ended_ns
    assert inner.lane == outer.lane == SCRIPT


def test_a_timed_function_is_that_function_and_threads_have_lanes():
    recorder = Recorder()
    double = recorder.timed(lambda number, times=2: number * times, "double", "command")
    assert double(4, times=3) == 12
    threads = [threading.Thread(target=double, args=(1,), name="loader") for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lanes = [one.lane for one in recorder.spans]
    assert lanes[0] == SCRIPT and all(lane.startswith("loader (") for lane in lanes[1:])


def test_what_is_left_between_two_times():
    spans = [span(0, 10), span(5, 25), span(12, 18), span(15, 40), span(20, 30)]
    assert within(spans, 10, 20) == [span(10, 20), span(12, 18), span(15, 20)]


def test_overlapping_spans_get_lanes_of_their_own():
    placed = on_lanes([span(20, 30), span(0, 10), span(5, 25), span(10, 15)], "collectives")
    assert placed == [
        span(0, 10, "collectives"),
        span(5, 25, "collectives 2"),
        span(10, 15, "collectives"),
        span(20, 30, "collectives"),
    ]


def test_processes_of_a_machine_have_one_clock():
    one, other = this_clock(), this_clock()
    assert one.machine == other.machine
    assert abs(one.wall_ahead_ns - other.wall_ahead_ns) < 1e9
