"""The mesh of worker processes: order, errors, output, environment, speed of failure. One mesh serves most tests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest
import torch
from rotating import rotating_from
from torch.utils.data import DataLoader, TensorDataset

from moreh_ap.errors import MeshStartError, WorkerError, WorkerLostError
from moreh_ap.runtime.host.agent_process import AgentProcess
from moreh_ap.runtime.worker_group import MAX_OUTSTANDING, WorkerGroup

EXECUTOR = "runtime_executor:Executor"
NOT_HUNG_S = 30.0
"""A bound on what takes a second or less on an idle machine: a mistake waits for ever, a busy machine only longer."""
LOOPBACK_HEX = {"0100007F", "00000000000000000000000001000000"}


def start_mesh(num_workers: int = 2, **options) -> WorkerGroup:
    return WorkerGroup(num_workers, device_type="cpu", threads_per_worker=1, executor=EXECUTOR, **options)


@pytest.fixture(scope="module")
def shared():
    mesh = start_mesh(preimport=("colorsys",))
    mesh.wait_ready(60)
    yield mesh
    mesh.close()


@pytest.fixture
def mesh(shared):
    """The shared mesh; whatever a test leaves unread must not reach the next one."""
    yield shared
    shared.drain()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition, timeout_s: float = NOT_HUNG_S) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


# -- commands and results ----------------------------------------------------------------------------------------------


def test_same_command_reaches_every_worker_and_answers_come_in_rank_order(mesh):
    assert mesh.submit(("rank",)).result() == [0, 1]


def test_each_worker_gets_its_own_command(mesh):
    assert mesh.submit_each([("echo", "a"), ("echo", "b")]).result() == ["a", "b"]
    with pytest.raises(ValueError, match="1 commands for 2 workers"):
        mesh.submit_each([("rank",)])


def test_commands_run_in_the_order_of_submission(mesh):
    before = mesh.submit(("log",)).result()[0]
    for number in range(0, 600, 2):  # more than may be outstanding
        mesh.submit(("append", number))
        mesh.submit_each([("append", number + 1)] * 2)
    assert mesh.submit(("log",)).result() == [before + list(range(600))] * 2


def test_collectives_work(mesh):
    assert mesh.submit(("all_reduce", 2.0)).result() == [6.0, 6.0]


@pytest.mark.parametrize("make", [bytes, lambda data: np.frombuffer(data, dtype=np.uint8)], ids=["bytes", "array"])
@pytest.mark.parametrize("num_bytes", [100, 3_000_000])
def test_payloads_arrive_and_come_back_unchanged(mesh, make, num_bytes):
    data = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8).tobytes()
    assert mesh.submit(("sum", make(data))).result() == [sum(data)] * 2
    assert [bytes(value) for value in mesh.submit(("echo", make(data))).result()] == [data] * 2


def test_a_command_is_taken_as_it_is_when_submitted(mesh):
    command = ("echo", [1])
    mesh.submit(("sleep", 0.1))
    reply = mesh.submit(command)
    command[1].append(2)
    assert reply.result() == [[1], [1]]


def test_waits_are_counted_only_where_a_caller_waits(mesh):
    before = mesh.num_waits
    replies = [mesh.submit(("echo", number)) for number in range(20)]
    assert mesh.num_waits == before
    replies[-1].result()
    assert mesh.num_waits == before + 1
    assert [reply.result()[0] for reply in replies] == list(range(20))
    assert mesh.num_waits == before + 1


def test_callbacks_run_once_done_and_may_read_the_result(mesh):
    found, done = [], threading.Event()
    reply = mesh.submit(("sleep", 0.1))
    reply.add_done_callback(lambda answered: (found.append(answered.result()), done.set()))
    assert not reply.done()
    assert done.wait(5)
    reply.add_done_callback(lambda answered: found.append("at once"))
    assert found == [[None, None], "at once"]


def test_result_times_out_and_can_be_asked_again(mesh):
    reply = mesh.submit(("sleep", 0.5))
    with pytest.raises(TimeoutError):
        reply.result(timeout=0.05)
    assert reply.result(timeout=10) == [None, None]


def test_outstanding_commands_are_bounded(mesh):
    before = mesh.num_waits
    mesh.submit(("sleep", 2.0))
    started_s = time.monotonic()
    for _ in range(MAX_OUTSTANDING - 1):
        mesh.submit(("echo", None))
    not_full_s = time.monotonic() - started_s
    mesh.submit(("echo", None))
    assert time.monotonic() - started_s >= 1.9 > not_full_s
    assert mesh.num_waits == before


def test_results_can_be_read_where_an_event_loop_runs(mesh, recwarn):
    async def cell():
        return mesh.submit(("rank",)).result()

    assert asyncio.run(cell()) == [0, 1]
    assert not [warning for warning in recwarn if "event loop" in str(warning.message)]


def test_round_trip_and_submit_are_quick(mesh):
    """Bounds are ten times what an idle machine needs, and what counts is the tenth that a neighbour delayed least."""
    mesh.submit(("echo", None)).result()
    round_trips_s, submits_s = [], []
    for _ in range(200):
        started_s = time.perf_counter()
        reply = mesh.submit(("echo", None))
        submits_s.append(time.perf_counter() - started_s)
        reply.result()
        round_trips_s.append(time.perf_counter() - started_s)
    assert sorted(round_trips_s)[20] < 0.010
    assert sorted(submits_s)[20] < 0.002


# -- errors ------------------------------------------------------------------------------------------------------------


def test_error_has_its_own_type_and_the_workers_traceback_and_is_raised_once(mesh):
    reply = mesh.submit(("raise", KeyError("missing")))
    with pytest.raises(KeyError, match="missing") as caught:
        reply.result()
    assert caught.value.__cause__.rank == 0
    assert "do_raise" in str(caught.value.__cause__)
    mesh.check()
    assert mesh.submit(("rank",)).result() == [0, 1]


def test_error_of_a_dropped_reply_is_raised_at_the_next_call(mesh):
    mesh.submit(("raise", ZeroDivisionError("dropped")))
    with pytest.raises(ZeroDivisionError):
        mesh.drain()
    mesh.drain()
    mesh.submit(("raise", ZeroDivisionError("dropped")))
    later = mesh.submit(("sleep", 0))
    concurrent.futures.wait([later])
    with pytest.raises(ZeroDivisionError):
        mesh.submit(("rank",))
    mesh.check()


def test_commands_sent_behind_a_failure_are_skipped_and_not_reported_again(mesh):
    mesh.submit(("raise", ValueError("first")))
    behind = mesh.submit(("append", "must not happen"))
    with pytest.raises(ValueError, match="first"):
        behind.result()
    mesh.check()
    assert "must not happen" not in mesh.submit(("log",)).result()[0]


def test_exceptions_that_do_not_pickle_keep_their_name_and_text(mesh):
    with pytest.raises(WorkerError, match="broken 7") as caught:
        mesh.submit(("raise_unpicklable",)).result()
    assert type(caught.value).__name__ == "UnpicklableError"
    assert "do_raise_unpicklable" in str(caught.value.__cause__)


def test_exception_class_of_the_script_comes_back_as_that_class(mesh, monkeypatch):
    class ScriptError(Exception):
        pass

    ScriptError.__module__, ScriptError.__qualname__ = "__main__", "ScriptError"
    monkeypatch.setattr(sys.modules["__main__"], "ScriptError", ScriptError, raising=False)

    def fail():
        raise ScriptError("mine")

    fail.__module__ = "__main__"
    with pytest.raises(ScriptError, match="mine"):
        mesh.submit(("raise_of_main", cloudpickle.dumps(fail))).result()


def test_results_and_commands_that_do_not_pickle_are_errors(mesh):
    with pytest.raises((pickle.PicklingError, AttributeError)):
        mesh.submit(("unpicklable_result",)).result()
    with pytest.raises((pickle.PicklingError, AttributeError)):
        mesh.submit(("echo", lambda: None))
    assert mesh.submit(("rank",)).result() == [0, 1]


def test_exit_in_a_worker_is_an_exception_like_any_other(mesh):
    with pytest.raises(SystemExit):
        mesh.submit(("raise", SystemExit(3))).result()
    assert mesh.submit(("rank",)).result() == [0, 1]


def test_recoverable_command_may_fail_on_one_worker(mesh):
    with pytest.raises(IndexError) as caught:
        mesh.submit(("raise", IndexError("bad row"), [1]), recoverable=True).result()
    assert caught.value.__cause__.rank == 1
    assert mesh.submit(("rank",)).result() == [0, 1]


def test_failure_reported_by_a_callback_is_raised_at_the_next_call(mesh):
    mesh.fail(ArithmeticError("found late"))
    with pytest.raises(ArithmeticError, match="found late"):
        mesh.submit(("rank",))
    assert mesh.submit(("rank",)).result() == [0, 1]


def test_wait_for_a_result_can_be_interrupted_and_workers_go_on(mesh):
    reply = mesh.submit(("sleep", 3.0))
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        reply.result()
    assert time.monotonic() - started_s < 2.5
    assert reply.result() == [None, None]


# -- what workers are given --------------------------------------------------------------------------------------------


def test_environment_of_workers(mesh):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "MOREH_ENABLE_ADVANCED_PARALLELIZATION"]
    first, second = mesh.submit(("environment", names)).result()
    assert list(first.values()) == ["0", "2", "0", "1", "0"]
    assert list(second.values()) == ["1", "2", "1", "1", "0"]


def test_workers_listen_on_loopback_only_and_lead_their_process_groups(mesh):
    for facts in mesh.submit(("facts",)).result():
        assert facts["listening"], "gloo listens somewhere"
        assert set(facts["listening"]) <= LOOPBACK_HEX
        assert facts["group"] == facts["pid"] != os.getpgid(0)
        assert facts["threads"] == 1
        assert facts["modules"] == ["torch", "colorsys"]
    assert [facts["pid"] for facts in mesh.submit(("facts",)).result()] == mesh.pids


def test_controller_keeps_its_environment(mesh):
    assert not [name for name in os.environ if name.startswith(("HYPERACTOR", "MONARCH"))]


def test_forks_and_subprocesses_of_the_script_work(mesh):
    data = TensorDataset(torch.arange(64))
    loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
    assert sum(int(batch[0].sum()) for batch in loader) == 2016
    assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, timeout=30).stdout == b"1\n"

    def use_the_parents_workers() -> None:
        try:
            mesh.submit(("rank",))
        except WorkerLostError:
            sys.exit(42)

    child = multiprocessing.get_context("fork").Process(target=use_the_parents_workers)
    child.start()
    child.join(30)
    assert child.exitcode == 42
    assert mesh.submit(("rank",)).result() == [0, 1]


# -- output ------------------------------------------------------------------------------------------------------------


def test_equal_lines_appear_once_and_differing_ones_with_a_prefix(mesh, capsys):
    mesh.submit(("print", "same line", "rank {rank} differs")).result()
    mesh.submit(("print_error", "to stderr")).result()
    out, err = "", ""

    def seen() -> bool:
        nonlocal out, err
        new = capsys.readouterr()
        out, err = out + new.out, err + new.err
        return "[worker 1]" in out and "to stderr" in err

    assert wait_until(seen)
    time.sleep(1.2)  # longer than a line may be held back
    seen()
    assert out.splitlines() == ["same line", "rank 0 differs", "[worker 1] rank 1 differs"]
    assert err.splitlines() == ["to stderr"]


def test_log_records_of_workers_and_script_carry_no_prefix_of_the_engine(mesh, capsys, caplog):
    import logging

    mesh.submit(("log_record", "from a worker")).result()
    err = ""

    def seen() -> bool:
        nonlocal err
        err += capsys.readouterr().err
        return "from a worker" in err

    assert wait_until(seen)
    assert "from a worker" in err.splitlines()
    handler = logging.StreamHandler()
    logger = logging.getLogger("script")
    logger.addHandler(handler)
    logger.warning("from the script")
    logger.removeHandler(handler)
    assert "from the script" in capsys.readouterr().err.splitlines()


# -- the end of workers ------------------------------------------------------------------------------------------------


def test_killed_worker_is_an_error_within_ten_seconds_and_stops_the_mesh():
    with_child = start_mesh(2)
    children = with_child.submit(("start_child",)).result(60)
    pids = with_child.pids
    reply = with_child.submit(("sleep", 60))
    started_s = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=r"Worker 1 of 2 \(process \d+\) died: killed by signal 9"):
        reply.result()
    assert time.monotonic() - started_s < 10
    with pytest.raises(WorkerLostError, match="workers are stopped: WorkerLostError: Worker 1 of 2"):
        with_child.submit(("rank",))
    with_child.close()
    assert wait_until(lambda: not any(map(alive, [*pids, *children])))


def test_worker_that_dies_while_idle_is_noticed_without_a_call():
    mesh = start_mesh(1)
    mesh.wait_ready(60)
    os.kill(mesh.pids[0], signal.SIGSEGV)
    error = None

    def raised() -> bool:
        nonlocal error
        try:
            mesh.check()
        except WorkerLostError as lost:
            error = lost
        return error is not None

    assert wait_until(raised)
    assert "died" in str(error)
    assert "Fatal Python error" in str(error)
    mesh.close()


@pytest.mark.parametrize("command", [("raise_then_collective", 1), ("die", 1, "exit")], ids=["raises", "exits"])
def test_failure_of_one_worker_while_the_other_waits_for_it(command):
    expected = {"raise_then_collective": ValueError, "die": WorkerLostError}[command[0]]
    mesh = start_mesh(2)
    mesh.wait_ready(60)
    pids = mesh.pids
    reply = mesh.submit(command)
    behind = mesh.submit(("append", 1))
    started_s = time.monotonic()
    with pytest.raises(expected):
        behind.result()
    assert time.monotonic() - started_s < NOT_HUNG_S
    assert reply.exception() is not None
    with pytest.raises(WorkerLostError, match="workers are stopped"):
        mesh.submit(("rank",))
    mesh.close()
    assert wait_until(lambda: not any(map(alive, pids)))


def test_unrecoverable_failure_of_some_workers_stops_the_mesh():
    mesh = start_mesh(2)
    mesh.submit(("rank",)).result(60)
    with pytest.raises(MemoryError):
        mesh.submit(("raise", MemoryError("rank 1 only"), [1])).result()
    with pytest.raises(WorkerLostError, match="workers are stopped: MemoryError: rank 1 only"):
        mesh.submit(("rank",))
    mesh.close()


def test_two_meshes_at_once_and_progress():
    seen = []
    first = start_mesh(1, on_progress=lambda *stage: seen.append(stage))
    second = start_mesh(1)
    early = first.submit(("all_reduce", 1.0))
    assert [early.result(60), second.submit(("all_reduce", 2.0)).result(60)] == [[1.0], [2.0]]
    first.wait_ready(10)
    assert seen == [("spawn", 0, 1), ("connect", 1, 1), ("link", 0, 1), ("ready", 1, 1)]
    first.close()
    first.close()
    assert second.submit(("rank",)).result() == [0]
    second.close()
    with pytest.raises(WorkerLostError, match="closed"):
        second.submit(("rank",))


def test_start_that_cannot_succeed_says_why(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    mesh = WorkerGroup(2, device_type="cuda", threads_per_worker=1, executor=EXECUTOR)
    with pytest.raises(MeshStartError, match="2 workers need 2 GPUs"):
        mesh.wait_ready(60)
    mesh.close()


def test_start_fails_when_a_process_ends_early(monkeypatch):
    monkeypatch.setattr("moreh_ap.runtime.bootstrap.Launch.__str__", lambda self: "not a launch")
    mesh = start_mesh(1)
    with pytest.raises(MeshStartError):
        mesh.wait_ready(60)
    mesh.close()


def test_processes_that_start_too_slowly_are_said_to_be():
    from monarch.config import configured

    mesh = start_mesh(2)
    mesh.wait_ready(60)  # the engine is there
    mesh.close()
    with configured(host_spawn_ready_timeout="20ms"):
        mesh = start_mesh(2)
        with pytest.raises(MeshStartError, match="not ready in the 30 s"):
            mesh.wait_ready(60)
        mesh.close()
    mesh = start_mesh(2)
    mesh.wait_ready(60)
    mesh.close()


@pytest.mark.parametrize("num_deaf", rotating_from(1, [1, 2]))
def test_an_agent_that_does_not_answer_is_started_again_once(monkeypatch, num_deaf):
    mesh = start_mesh(1)
    mesh.wait_ready(60)  # the engine is there
    mesh.close()
    address, agents = AgentProcess.address, []

    def deaf_at_first(agent, timeout_s):
        result = address(agent, timeout_s)
        agents.append(agent)
        if len(agents) <= num_deaf:
            os.kill(agent.pid, signal.SIGSTOP)
        return result

    monkeypatch.setattr(AgentProcess, "address", deaf_at_first)
    monkeypatch.setattr("moreh_ap.runtime.engine._ATTACH_TIMEOUT_S", 1.0)
    mesh = start_mesh(2)
    if num_deaf == 1:
        mesh.wait_ready(60)
        assert mesh.submit(("rank",)).result() == [0, 1]
    else:
        with pytest.raises(MeshStartError, match="does not answer: Timeout"):
            mesh.wait_ready(60)
    mesh.close()
    assert len(agents) == 2
    assert agents[0].exit_code() == -signal.SIGKILL


SCRIPT = """
import os, sys, time, signal
sys.path[:0] = {path!r}
import torch
from moreh_ap.runtime.worker_group import WorkerGroup
assert not any(name.split(".")[0] == "monarch" for name in sys.modules)
mesh = WorkerGroup({num_workers}, device_type="cpu", threads_per_worker=1, executor={executor!r})
{body}
"""

BUSY = """
mesh.wait_ready(60)
mesh.submit(("print", "a line of the workers"))
mesh.drain()
mesh.submit(("sleep", 60))
os.write(1, ("pids " + " ".join(map(str, mesh.pids)) + "\\n").encode())  # not through a buffer that dies with it
"""

STARTING = """
while len(mesh.pids) < 1:
    time.sleep(0.01)
os.write(1, ("pids " + " ".join(map(str, mesh.pids)) + "\\n").encode())  # not through a buffer that dies with it
"""

ENDINGS = {
    "sys.exit": (2, BUSY + "sys.exit(7)", 7),
    "interrupt": (1, BUSY + "os.kill(os.getpid(), signal.SIGINT); mesh.drain()", -signal.SIGINT),
    "terminate": (1, BUSY + "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
    "kill": (1, BUSY + "os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "end of script while workers start": (2, STARTING, 0),
}


SLOW_END = """
import monarch.actor

engine, real = sys.modules["monarch._src.actor.actor_mesh"], monarch.actor.shutdown_context


class Slow:
    def __init__(self, future):
        self.future = future

    def get(self, timeout):
        self.future.get(timeout)
        raise TimeoutError  # as where the machine is busy


def shut_down(**options):
    monarch.actor.shutdown_context = engine.shutdown_context = real  # the first call ends it
    return Slow(real(**options))


monarch.actor.shutdown_context = engine.shutdown_context = shut_down
"""


@pytest.mark.parametrize("name", rotating_from(1, ENDINGS))
def test_no_process_is_left_however_the_script_ends(name):
    num_workers, body, code = ENDINGS[name]
    path = [*sys.path, os.path.dirname(__file__)]
    text = SCRIPT.format(path=path, executor=EXECUTOR, num_workers=num_workers, body=body)
    process = subprocess.Popen([sys.executable, "-c", text], stdout=-1, stderr=-1, text=True)
    out = [process.stdout.readline()]
    while out[-1] and not out[-1].startswith("pids"):
        out.append(process.stdout.readline())
    ending_s = time.monotonic()
    rest, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert time.monotonic() - ending_s < 10
    pids = [int(pid) for pid in out[-1].split()[1:]]
    assert pids, (out, rest, err)
    assert wait_until(lambda: not any(map(alive, pids)))
    if name == "sys.exit":
        lines = "".join([*out, rest]).splitlines()
        assert [line for line in lines if not line.startswith("pids")] == ["a line of the workers"]
    if name in ("sys.exit", "end of script while workers start"):
        assert err == ""


def test_an_engine_that_takes_long_to_end_prints_nothing():
    path = [*sys.path, os.path.dirname(__file__)]
    text = SCRIPT.format(path=path, executor=EXECUTOR, num_workers=1, body="mesh.wait_ready(60)\n" + SLOW_END)
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
