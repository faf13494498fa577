"""The file of a trace: names, one time axis, arrows, and that it is whole at any moment."""

from __future__ import annotations

import json

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.tracing import chrome_trace
from moreh_ap.tracing.chrome_trace import STEPS, ProcessTrace, cut, events
from moreh_ap.tracing.spans import SCRIPT, Clock, Span

HERE, ELSEWHERE = Clock("here", 1_000), Clock("elsewhere", 51_000)


def span(name, began_ns, ended_ns, lane=SCRIPT, **details):
    return Span(name, "call", began_ns, ended_ns, lane, details)


def of_kind(found, kind):
    return [event for event in found if event["ph"] == kind]


def test_processes_and_lanes_have_names_and_an_order():
    spans = [span("later", 3000, 4000, "loader (7)"), span("call", 1000, 2000), span("step 1", 1000, 4000, STEPS)]
    found = list(events([ProcessTrace("controller", 77, HERE, spans), ProcessTrace("worker 0", 78, HERE, [])]))
    names = [(e["name"], e["pid"], e["tid"], e["args"]) for e in of_kind(found, "M")]
    assert ("process_name", 0, 0, {"name": "controller"}) in names
    assert ("process_labels", 1, 0, {"labels": "process 78"}) in names
    lanes = [args["name"] for name, _, _, args in names if name == "thread_name"]
    assert lanes == [STEPS, SCRIPT, "loader (7)"]
    times = {e["name"]: (e["tid"], e["ts"], e["dur"]) for e in of_kind(found, "X")}
    assert times == {"step 1": (0, 0.0, 3.0), "call": (1, 0.0, 1.0), "later": (2, 2.0, 1.0)}


def test_processes_of_other_machines_are_put_on_the_same_axis_by_their_wall_clocks():
    controller = ProcessTrace("controller", 1, HERE, [span("call", 100_000, 140_000)])
    near = ProcessTrace("worker 0", 2, Clock("here", 9_999_999), [span("near", 110_000, 120_000, "commands")])
    far = ProcessTrace("worker 1", 3, ELSEWHERE, [span("far", 60_000, 70_000, "commands")])
    times = {e["name"]: e["ts"] for e in of_kind(events([controller, near, far]), "X")}
    assert times == {"call": 0.0, "near": 10.0, "far": 10.0}
    assert cut(far, HERE, 115_000, 200_000).spans == [span("far", 65_000, 70_000, "commands")]


def test_an_arrow_leads_from_a_message_to_each_worker_that_got_it():
    sent = [span("send forward", 1000, 2000, message=5), span("send backward", 3000, 4000, message=6)]
    workers = [
        ProcessTrace(f"worker {rank}", rank, HERE, [span("message", 2500 + rank, 2800, "commands", message=5)])
        for rank in range(2)
    ]
    found = list(events([ProcessTrace("controller", 9, HERE, sent), *workers]))
    begin, end = of_kind(found, "s"), of_kind(found, "f")
    assert [(e["pid"], e["ts"]) for e in begin] == [(0, 0.0), (0, 0.0)]
    assert [(e["pid"], e["ts"], e["bp"]) for e in end] == [(1, 1.5, "e"), (2, 1.501, "e")]
    ids = [e["id"] for e in begin]
    assert ids == [e["id"] for e in end] and len(set(ids)) == 2


def test_a_file_is_whole_before_and_after(tmp_path):
    file = tmp_path / "trace.json"
    chrome_trace.claim(file)
    assert json.loads(file.read_text()) == {"traceEvents": []}
    controller = ProcessTrace("controller", 9, HERE, [span("call", 0, 5)])
    chrome_trace.write(file, [controller], {"steps": "1-1"})
    written = json.loads(file.read_text())
    assert written["otherData"] == {"steps": "1-1"} and of_kind(written["traceEvents"], "X")
    with pytest.raises(TypeError):  # what JSON does not know
        chrome_trace.write(file, [controller], {"steps": object()})
    assert json.loads(file.read_text()) == written and list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_written_is_refused_before_the_training(tmp_path):
    with pytest.raises(OptionError, match="No such file or directory") as refused:
        chrome_trace.claim(tmp_path / "missing" / "trace.json")
    assert str(refused.value).count("\n") == 3 and "See: docs/trace.md" in str(refused.value)
