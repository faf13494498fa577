"""What is a hang, and what only takes long."""

from __future__ import annotations

from typing import Any

import pytest

from moreh_ap.runtime.hangs import hang_watch, stack_answers, worker_sights
from moreh_ap.runtime.hangs.hang_watch import HANG_S, HangWatch
from moreh_ap.runtime.hangs.process_looks import Look
from moreh_ap.runtime.hangs.watched_workers import WorkersHere
from moreh_ap.runtime.hangs.worker_sights import QUIET_S

PIDS = {0: 100, 1: 101}
NOBODY = [False, False]


def stacks(*frames: tuple[str, str]) -> str:
    """Returns what a worker says whose thread for commands is in these functions, innermost first."""
    served = (
        *frames,
        ("/x/moreh_ap/runtime/worker/actor.py", "execute"),
        ("/x/moreh_ap/runtime/worker/actor.py", "serve"),
    )
    lines = [f'  File "{file}", line 1 in {function}\n' for file, function in served]
    return f'Thread 0x1 (most recent call first):\n  File "/usr/lib/threading.py", line 1 in wait\n\n' \
           f'Thread 0x2 (most recent call first):\n{"".join(lines)}'  # fmt: skip


IN_ALL_REDUCE = stacks(("/x/torch/distributed/distributed_c10d.py", "all_reduce"))
IN_RECV = stacks(("/x/torch/distributed/distributed_c10d.py", "recv"), ("/home/me/model.py", "forward"))


class Machine:
    """A clock, and processes."""

    def __init__(self) -> None:
        self.now_s, self.looks, self.stacks = 1000.0, {100: Look("S", 5.0), 101: Look("S", 5.0)}, {0: "", 1: ""}
        self.children_s = 0.0
        self.num_asked = 0

    def read(self, pids: Any) -> dict[int, str]:
        self.num_asked += 1
        return self.stacks

    def pass_time(self, watch: HangWatch, seconds: float, answered: list[bool] = NOBODY, number: int = 3) -> Any:
        """Returns the first hang that is found; the watch is asked ten times a second."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.1
            hang = watch.look(number, answered)
            if hang is not None:
                return hang
        return None

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def machine(monkeypatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: made.now_s)
    monkeypatch.setattr(hang_watch.time, "sleep", made.sleep)
    monkeypatch.setattr(worker_sights, "look_at", made.looks.get)
    monkeypatch.setattr(stack_answers, "processor_s_of_children", lambda pid: made.children_s)
    monkeypatch.setattr(stack_answers.stack_dumps, "read", made.read)
    return made


def watching() -> HangWatch:
    return HangWatch(WorkersHere(PIDS))


def test_a_worker_that_a_signal_has_stopped_hangs(machine):
    machine.looks[101] = Look("T", 5.0)
    begun_s = machine.now_s
    hang = machine.pass_time(watching(), 60)
    assert hang.rank == 1 and hang.how.startswith("has been stopped by a signal for 3") and HANG_S == 30
    assert machine.now_s - begun_s < HANG_S + 5
    assert hang.stacks == machine.stacks


def test_one_that_has_answered_a_debugger_that_holds_it_and_one_that_goes_on_are_no_hangs(machine):
    watch = watching()
    machine.looks[101] = Look("T", 5.0)
    assert machine.pass_time(watch, 2 * HANG_S, [False, True]) is None
    machine.looks[101] = Look("t", 5.0)
    assert machine.pass_time(watch, 2 * HANG_S, number=4) is None
    for state in "TSTST":
        machine.looks[101] = Look(state, 5.0)
        assert machine.pass_time(watch, HANG_S - 5, number=5) is None


def test_time_in_which_this_process_was_stopped_too_does_not_count(machine):
    watch = watching()
    machine.looks[101] = Look("T", 5.0)
    assert machine.pass_time(watch, 5) is None
    machine.now_s += 10_000  # a laptop that slept, or Ctrl-Z
    assert machine.pass_time(watch, 5) is None
    assert machine.pass_time(watch, HANG_S) is not None


@pytest.mark.parametrize(
    "said, answered, beside",
    [
        ((IN_ALL_REDUCE, IN_RECV), NOBODY, "all_reduce for 3. s, which will never end (worker 1 in recv)"),
        ((IN_RECV, ""), [False, True], "recv for 3. s, which will never end (worker 1 is through)"),
    ],
)
def test_a_collective_that_no_other_worker_can_enter_hangs(machine, said, answered, beside):
    machine.stacks = dict(enumerate(said))
    begun_s = machine.now_s
    hang = machine.pass_time(watching(), 60, answered)
    assert hang.rank == 0 and machine.now_s - begun_s < HANG_S + 6
    before, after = beside.split("3. s")
    assert hang.how.startswith(f"has waited in {before}") and hang.how.endswith(after)


@pytest.mark.parametrize(
    "other",
    [
        stacks(("/home/me/model.py", "forward")),  # holds the interpreter's lock, sleeps, waits for a lock of its own
        stacks(("/usr/lib/python3.12/subprocess.py", "wait"), ("/x/torch/_inductor/cpp_builder.py", "build")),
        stacks(("/usr/lib/python3.12/selectors.py", "select"), ("/x/torch/distributed/distributed_c10d.py", "recv")),
        "",
    ],
)
def test_a_worker_that_is_elsewhere_may_still_come(machine, other):
    machine.stacks = {0: IN_ALL_REDUCE, 1: other}
    assert machine.pass_time(watching(), 30 + 60 + 120 + 20) is None
    assert machine.num_asked == 3, "each time after twice as long"


def test_a_worker_that_computes_or_whose_children_do_is_not_asked_or_believed(machine, monkeypatch):
    watch = watching()
    machine.stacks = {0: IN_ALL_REDUCE, 1: IN_RECV}
    for _ in range(100):
        machine.looks[100] = Look("R", machine.looks[100].processor_s + QUIET_S)
        assert machine.pass_time(watch, 2) is None
    assert machine.num_asked == 0
    count = iter(range(1000))
    monkeypatch.setattr(stack_answers, "processor_s_of_children", lambda pid: float(next(count)))
    assert machine.pass_time(watch, 100) is None
    assert machine.num_asked > 0
