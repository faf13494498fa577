"""The plan of a script, in this process: what its user is told."""

from __future__ import annotations

import pytest

from moreh_ap.cli import plan_script
from moreh_ap.errors import MorehError, OptionError
from moreh_ap.planner.cost.hardware import find_cluster

CLUSTER = find_cluster("8xH100-80GB")
BEGINNING = "import sys, torch\ntorch.moreh.option.enable_advanced_parallelization()\n"


def planned(tmp_path, text, *arguments, beginning=BEGINNING):
    script = tmp_path / "train.py"
    script.write_text(beginning + text)
    return plan_script.planned(script, list(arguments), CLUSTER, with_weights=False, shows_output=False)


def test_a_script_is_planned_and_its_output_is_not_heard(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (
        "import os\nos.write(1, sys.argv[1].encode())\nos.write(2, b'Traceback')\n"
        "open('log.txt', 'w').close()\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192) for _ in range(8))).cuda()\n"
        "try:\n    model(torch.ones(64, 8192).cuda())\nexcept:\n    pass\n"
    )
    first, plan, notes = planned(tmp_path, text, "--token")
    assert plan.choice.plan.num_devices == 8 and first.question.rows == 64
    assert notes == ["Before its first call the script changed files: log.txt."]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0\n", r"ended with an error \(line 3\) before a model was called: ZeroDivisionError"),
        ("input('go on? ')\n", r"asks a question \(line 3\)"),
        ("raise ValueError(sys.argv[2])\n", r"ValueError: \(set\)"),
        ("print(torch.nn.Linear(2, 2).weight.sum().item())\n", "reads the value of a weight"),
        ("pass\n", "gives nothing to plan: it ended before"),
        ("sys.exit('usage')\n", "it exited with 'usage'"),
    ],
)
def test_a_script_that_does_not_come_to_a_call_is_told_why_in_four_lines(tmp_path, text, said):
    with pytest.raises(MorehError, match=said) as error:
        planned(tmp_path, text, "--api-key", "very-secret")
    assert len(str(error.value).splitlines()) == 4 and "very-secret" not in str(error.value)


def test_a_script_without_the_one_line_is_told_of_it(tmp_path):
    with pytest.raises(OptionError, match=r"\(line 2\) before it called the one line: ValueError: no GPU") as error:
        planned(tmp_path, "raise ValueError('no GPU')\n", beginning="import torch\n")
    assert "Try: torch.moreh.option.enable_advanced_parallelization()" in str(error.value)


@pytest.mark.parametrize(
    "text, fix", [("import no_such.thing", "pip install no_such"), ("open('/no/such')", "python train.py")]
)
def test_another_error_before_the_one_line_is_told_as_it_is(tmp_path, text, fix):
    with pytest.raises(OptionError, match="before it called the one line") as error:
        planned(tmp_path, f"{text}\n", beginning="import torch\n")
    assert error.value.fix == fix


def test_an_option_that_the_script_refuses_is_taken_for_one_of_the_command(tmp_path):
    with pytest.raises(OptionError, match="exited with 2, as for an option that it does not have") as error:
        planned(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args()\n", "--devices", "8xH100")
    assert "those of moreh-ap plan before it" in error.value.allowed and error.value.fix == "python train.py --help"


def test_an_error_of_the_one_line_is_its_own(tmp_path):
    text = "import torch\ntorch.moreh.option.enable_advanced_parallelization(devices=0)\n"
    with pytest.raises(OptionError, match="devices=0"):
        planned(tmp_path, text, beginning="")


def test_values_that_may_be_secret_are_masked(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "open sesame")
    monkeypatch.setenv("API_KEY", "1")  # too short to be told from a word
    said = plan_script.masked("open sesame, 1, hf_ABCDEFGHIJKLMNOP, tok-123456", ["--token=tok-123456"])
    assert said == "(set), 1, (set), (set)"
