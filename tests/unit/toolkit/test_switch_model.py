"""`moreh-switch-model`: by answers and by argument."""

from __future__ import annotations

import builtins

import pytest

from moreh_ap import accelerator_models
from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.toolkit import switch_model
from unit.toolkit.samples import answers


def test_switching_by_answers(cpu_machine, monkeypatch, capsys):
    answers(monkeypatch, "9\nhuge\n\n1\n3\nQ\n")
    assert switch_model.main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "Current MoAI Accelerator: CPU.2\n\n1. CPU.1\n2. CPU.2  *\n3. CPU.4\n\nSelection (1-3, q, Q): 9\n"
    )
    assert "there is no number 9 in the list" in said and "there is no model 'huge'" in said
    assert 'The MoAI Accelerator model is successfully switched to  "CPU.1".' in said
    assert "1. CPU.1\n2. CPU.2\n3. CPU.4  *\n" in said
    assert accelerator_models.load("cpu").model == "CPU.4"


@pytest.mark.parametrize(
    ("text", "status", "model"), [("", 1, ""), ("7\n", 1, ""), ("1\n", 0, "CPU.1"), ("q\n1\n", 0, "")]
)
def test_input_that_ends(cpu_machine, monkeypatch, capsys, text, status, model):
    answers(monkeypatch, text)
    assert switch_model.main([]) == status
    assert accelerator_models.load("cpu").model == model
    assert ("Nothing was done" in capsys.readouterr().err) == (status == 1)


def test_ctrl_c_ends_with_its_status(cpu_machine, monkeypatch):
    def interrupted(question):
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupted)
    assert switch_model.main([]) == 130
    assert accelerator_models.load("cpu").model == ""


def test_switching_by_argument(cpu_machine, capsys):
    for arguments, model in ((["1"], "CPU.1"), (["-M", "3"], "CPU.4"), (["cpu.2"], "CPU.2"), (["--all"], "")):
        assert switch_model.main(arguments) == 0
        assert accelerator_models.load("cpu").model == model
    assert switch_model.main(["8"]) == 2
    said = capsys.readouterr().err
    assert "Allowed: CPU.1, CPU.2, CPU.4" in said and "Try: moreh-switch-model CPU.2" in said
    with pytest.raises(SystemExit, match="2"):
        switch_model.main(["1", "--all"])
    assert switch_model.main(["--list"]) == 0


def test_a_folder_that_cannot_be_written_is_an_error(cpu_machine, cache, monkeypatch, capsys):
    (cache / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(cache / "file"))
    assert switch_model.main(["1"]) == 2
    assert "the choice cannot be kept" in capsys.readouterr().err
