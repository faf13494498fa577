"""A report of a run: what its JSON says is what the script printed, however the script ends."""

from __future__ import annotations

import re

import pytest
from user_script import UserScript

from moreh_ap.reporting import page, run_record

pytestmark = pytest.mark.rotating  # one more kind of run each

TWO = {"MOREH_NUM_DEVICES": "2"}


def test_the_report_of_a_run(tmp_path):
    more = {"MOREH_LOG_LEVEL": "warning", "HF_TOKEN": "hf_secret"}
    with UserScript("reported.py", "24", cwd=tmp_path, **more, **TWO) as script:
        out = script.succeed()
    folder = tmp_path / "report"
    assert sorted(one.name for one in folder.iterdir()) == ["report.html", "report.json", "trace.json"]
    record = run_record.read(folder / "report.json")
    assert record.ending == "finished" and record.script.endswith("reported.py 24")
    assert len(record.steps) == 24 and {step.rows for step in record.steps} == {16}
    printed = [float(found) for found in re.findall(r"loss (\S+)", out)]
    assert [record.steps[number].loss for number in range(0, 24, 5)] == pytest.approx(printed, rel=1e-6)
    assert all(step.seconds is not None and step.seconds > 0 for step in record.steps[1:])
    assert [one.chosen.plan for one in record.models] == ["replicate=2"] and not record.models[0].others
    assert len(record.devices) == len(record.peak_bytes) == 2 and min(record.peak_bytes) > 0
    processes = {span["process"] for span in record.timeline}
    assert processes == {"controller", "worker 0", "worker 1"}
    assert any(line.startswith('plan="replicate=2"') for line in record.log), "the log too, though it was not shown"
    for name in ("report.html", "report.json"):
        assert "hf_secret" not in (folder / name).read_text()
    assert (folder / "report.html").read_text() == page.make(record), "the page is made from the JSON"


def test_losses_of_workers_are_counted(tmp_path):
    (tmp_path / "fatal").mkdir()
    more = {"FATAL_FOLDER": str(tmp_path / "fatal"), "MOREH_RECOVERY": "memory", "MOREH_REPORT": "report"}
    with UserScript("survive_losses.py", "replicate=2", "forward", cwd=tmp_path, **more) as script:
        num_lost = script.succeed(timeout_s=280).count("Others took over")
    assert num_lost >= 1
    assert run_record.read(tmp_path / "report" / "report.json").losses_survived == num_lost


@pytest.mark.parametrize("num_steps", ["0", "3", "9"])
def test_a_script_that_ends_early_with_an_error_has_a_report_too(tmp_path, num_steps):
    with UserScript("reported.py", num_steps, "fails", cwd=tmp_path, **TWO) as script:
        assert script.wait() == 1
        script.leaves_nothing()
    assert script.err.endswith("ValueError: the script has an error\n")
    record = run_record.read(tmp_path / "report" / "report.json")
    assert record.ending == "ended by ValueError: the script has an error"
    assert len(record.steps) == int(num_steps)
    assert len(record.devices) == len(record.peak_bytes) == (2 if record.steps else 0), "the workers end after it"
    assert "[info] the report of this run: " in script.out


def test_a_folder_that_cannot_be_made_is_refused_at_the_line(tmp_path):
    (tmp_path / "report").write_text("a file")
    with UserScript("reported.py", "3", cwd=tmp_path, **TWO) as script:
        assert script.wait() == 1
    assert "OptionError: report: " in script.err and "Try: MOREH_REPORT=report python train.py" in script.err
