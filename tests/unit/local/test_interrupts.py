"""Where a Ctrl-C is raised: once a function of ours returns, between the turns of a wait, or where it lands."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch

from moreh_ap.local import interrupts
from moreh_ap.local.interrupts import wait_in_turns

OURS = os.path.join(os.path.dirname(interrupts.__file__), "made_up_for_a_test.py")


def ours(source: str, **names: object) -> Callable[[], object]:
    """Returns a function `run` of `source`, as if it stood in a file of the package."""
    space = {"signal": signal, "torch": torch, "contextlib": contextlib, **names}
    exec(compile(source, OURS, "exec"), space)
    return space["run"]  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    undo = interrupts.install()
    yield
    undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and sys.gettrace() is None


def interrupted_in(step: Callable[[], object]) -> list[str]:
    """Returns the files of the frames that a KeyboardInterrupt went through; it has to come."""
    with pytest.raises(KeyboardInterrupt) as raised:
        step()
        step()
    assert sys.gettrace() is None
    return [frame.filename for frame in traceback.extract_tb(raised.tb)]


def test_a_function_of_ours_ends_before_an_interrupt_is_raised():
    done: list[int] = []
    run = ours("def run():\n    signal.raise_signal(signal.SIGINT)\n    done.append(1)\n", done=done)
    assert OURS not in interrupted_in(run) and done == [1]


def test_what_torch_does_for_ours_is_not_interrupted_either():
    source = """
class Interrupting(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        signal.raise_signal(signal.SIGINT)
        return func(*args, **(kwargs or {}))
def run():
    with Interrupting():
        torch.zeros(1)
"""
    assert OURS not in interrupted_in(ours(source))
    assert torch.overrides._len_torch_function_stack() == 0


def test_code_of_the_script_inside_of_ours_is_interrupted_at_once():
    seen: list[str] = []

    def forward() -> None:
        signal.raise_signal(signal.SIGINT)
        seen.append("after the interrupt")

    source = """
def run():
    try:
        forward()
    finally:
        seen.append("put back")
"""
    assert OURS in interrupted_in(ours(source, forward=forward, seen=seen)) and seen == ["put back"]


def test_an_error_of_ours_reaches_the_script_and_the_interrupt_its_handler():
    run = ours("def run():\n    signal.raise_signal(signal.SIGINT)\n    raise ValueError('ours')\n")
    with pytest.raises(KeyboardInterrupt) as raised:
        try:
            run()
        except ValueError:
            pytest.fail("the line after the interrupt ran")
    assert isinstance(raised.value.__context__, ValueError)


def test_a_wait_ends_between_two_turns():
    turns: list[float] = []
    source = """
def turn(seconds):
    turns.append(seconds)
    signal.raise_signal(signal.SIGINT)
    return False
def run():
    wait_in_turns(turn)
"""
    interrupted_in(ours(source, wait_in_turns=wait_in_turns, turns=turns))
    assert turns == [0.2]


def test_a_block_of_the_script_is_left_as_it_has_to_be():
    run = ours("def run():\n    signal.raise_signal(signal.SIGINT)\n")

    def body() -> None:
        with torch.no_grad():
            run()

    def returned() -> object:
        with torch.no_grad():
            return run()

    def handled() -> None:
        try:
            run()
        finally:
            torch.set_grad_enabled(True)

    def entered() -> None:
        with contextlib.nullcontext(run()), torch.no_grad():
            pass

    def in_a_loop() -> None:
        while True:
            with torch.no_grad():
                run()

    for step in (body, returned, handled, entered, in_a_loop):
        assert OURS not in interrupted_in(step)
        assert torch.is_grad_enabled()


def test_a_second_interrupt_is_raised_where_it_lands():
    source = """
def run():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    done.append(1)
"""
    done: list[int] = []
    assert OURS in interrupted_in(ours(source, done=done)) and done == []


def test_a_function_of_ours_that_takes_long_is_interrupted(monkeypatch):
    monkeypatch.setattr(interrupts, "_PATIENCE_S", 0.0)
    done: list[int] = []
    source = """
def call():
    pass
def run():
    signal.raise_signal(signal.SIGINT)
    call()
    done.append(1)
"""
    assert OURS in interrupted_in(ours(source, done=done)) and done == []


def test_a_debugger_keeps_its_trace():
    def trace(frame: object, event: str, value: object) -> None:
        return None

    run = ours("def run():\n    signal.raise_signal(signal.SIGINT)\n")
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
        assert sys.gettrace() is trace
    finally:
        sys.settrace(None)


def test_a_handler_of_the_script_stays():
    signal.signal(signal.SIGINT, handler := lambda *_: None)
    try:
        interrupts.install()()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, interrupts._on_interrupt)


@pytest.mark.parametrize(("needed", "timeout_s", "is_done"), [(1, None, True), (3, None, True), (10**9, 0.01, False)])
def test_a_wait_is_over_once_it_is_done_or_its_time_is(needed, timeout_s, is_done):
    turns: list[float] = []
    assert wait_in_turns(lambda seconds: turns.append(seconds) or len(turns) >= needed, timeout_s) is is_done
    assert all(0 <= seconds <= 0.2 for seconds in turns)
