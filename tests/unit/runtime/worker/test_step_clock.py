"""Which steps of a worker are measured."""

from __future__ import annotations

import time

from moreh_ap.runtime.worker.step_clock import StepClock


def step(clock: StepClock, num_backwards: int = 1, lasts_s: float = 0.0) -> None:
    for _ in range(num_backwards):
        clock.forward_begins()
        clock.backward_begins()
    time.sleep(lasts_s)
    clock.step_ended()


def test_a_step_is_from_its_forward_to_the_end_of_the_optimizer_s_step():
    clock = StepClock(is_cuda=False)
    time.sleep(0.05)
    step(clock, lasts_s=0.02)
    time.sleep(0.05)
    step(clock, lasts_s=0.04)
    first_s, second_s = clock.seconds()
    assert first_s >= 0.02 and second_s >= 0.04
    assert first_s + second_s < 0.16, "what was before the forwards is not counted"


def test_steps_that_add_up_gradients_are_left_out():
    clock = StepClock(is_cuda=False)
    step(clock, num_backwards=2)
    clock.step_ended()  # of a second optimizer
    assert clock.seconds() == ()
    step(clock)
    assert len(clock.seconds()) == 1


def test_only_the_last_steps_of_the_last_model_are_kept():
    clock = StepClock(is_cuda=False)
    for _ in range(20):
        step(clock)
    assert len(clock.seconds()) == 8
    clock.restart()
    assert clock.seconds() == ()
