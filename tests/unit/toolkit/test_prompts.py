"""Numbered lists, answers that are none, and how a tool ends."""

from __future__ import annotations

import io
import sys

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.toolkit import prompts


@pytest.fixture
def answers(monkeypatch):
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_the_current_model_is_marked_and_those_that_are_too_large_say_so():
    text = prompts.numbered({"CPU.1": 1, "CPU.2": 2, "CPU.8": 8}, "CPU.2", 4)
    assert text.splitlines() == ["1. CPU.1", "2. CPU.2  *", "3. CPU.8  (needs 8 devices)"]


def test_asks_again_until_the_answer_is_one(answers, capsys):
    def find(answer):
        if answer != "3":
            raise OptionError(f"there is no number {answer}", "1 to 3")
        return "found"

    answers("\n7\n3\n")
    assert prompts.ask(1, 3, find) == "found"
    said = capsys.readouterr().out
    assert said.count("Selection (1-3, q, Q): ") == 3
    assert "there is no number 7\nAllowed: 1 to 3" in said


@pytest.mark.parametrize("answer", ["q", "Q"])
def test_q_ends_without_an_answer(answers, answer):
    answers(f"{answer}\n")
    assert prompts.ask(1, 3, str) is None


@pytest.mark.parametrize(("answer", "agrees"), [("y", True), ("Yes", True), ("", False), ("n", False)])
def test_only_yes_agrees(answers, answer, agrees):
    answers(f"{answer}\n")
    assert prompts.agree("End this job?") is agrees


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (EOFError("there is no more input"), 1, "Nothing was done: there is no more input."),
        (OptionError("no such model", "CPU.1"), 2, "no such model"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_a_tool_ends(capsys, error, status, said):
    def tool():
        raise error

    assert prompts.run_tool(tool) == status
    assert said in capsys.readouterr().err
    assert prompts.run_tool(lambda: 0) == 0
