"""The process that imports PyTorch once and forks the workers: what they have of it, and whose death ends whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runtime_executor import Executor

from moreh_ap.errors import WorkerLostError
from moreh_ap.runtime.forking.descendants import descendants
from moreh_ap.runtime.worker_group import WorkerGroup

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="there is a warm parent on Linux only"),
    pytest.mark.rotating,  # one more module or end each
]
EXECUTOR = f"runtime_executor:{Executor.__name__}"
NOT_HUNG_S = 60.0


def start(num_workers: int = 2, threads_per_worker: int = 1, preimport: tuple[str, ...] = ()) -> WorkerGroup:
    return WorkerGroup(
        num_workers,
        device_type="cpu",
        threads_per_worker=threads_per_worker,
        executor=EXECUTOR,
        preimport=preimport,
    )


@pytest.fixture
def mesh():
    """Returns a function that starts a mesh, which is closed at the end."""
    started = []

    def start_one(*arguments, **options):
        started.append(start(*arguments, **options))
        return started[-1]

    yield start_one
    for one in started:
        one.close()


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Returns a function that writes a module of a library, which this process appears to have imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str, *, is_imported: bool = True) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "module.py").write_text(source)
        if is_imported:
            monkeypatch.setitem(sys.modules, name, sys)  # as if the script had
        return f"{name}.module"

    return write


def evaluated(mesh: WorkerGroup, text: str) -> list:
    """Returns what an expression is in each worker."""
    return mesh.submit(("evaluate", text)).result(NOT_HUNG_S)


def parents(pids: list[int]) -> set[int]:
    return {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def are_forked(mesh: WorkerGroup) -> bool:
    """Whether the workers have one parent, which is not their agent but a child of it."""
    (parent,) = parents(mesh.pids)
    return parent != mesh._launcher._agent.pid and "runtime.host.agent" in command_line(parent)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pids: list[int]) -> None:
    deadline_s = time.monotonic() + NOT_HUNG_S
    while left := [pid for pid in pids if is_there(pid)]:
        assert time.monotonic() < deadline_s, [command_line(pid) for pid in left]
        time.sleep(0.02)


COUNTING = """
import os, sys
class Counter:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            with open({log!r}, "a") as log:
                log.write(f"{{os.getpid()}}\\n")
sys.meta_path.insert(0, Counter)
"""

SCRIPT = """
import torch
from moreh_ap.runtime.worker_group import WorkerGroup
mesh = WorkerGroup(3, device_type="cpu", threads_per_worker=1, executor={executor!r})
mesh.wait_ready(100)
print(mesh.pids, mesh.submit(("evaluate", "torch.ones(2).sum().item()")).result())
"""


def test_torch_is_imported_once_for_all_workers(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(COUNTING.format(log=str(tmp_path / "log")))
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path), str(Path(__file__).parent)])
    command = [sys.executable, "-c", SCRIPT.format(executor=EXECUTOR)]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("[2.0, 2.0, 2.0]\n")
    importers = (tmp_path / "log").read_text().split()
    assert len(importers) == len(set(importers)) == 2, "the script and the warm parent"
    assert not {pid for pid in importers if f"{pid}," in ended.stdout}


def test_a_worker_is_as_if_it_had_been_started_anew(mesh, library, monkeypatch):
    monkeypatch.setenv("MOREH_TEST_TAKEN_AWAY", "1")
    source = "import os\nos.environ['MOREH_TEST_SET'] = 'at import'\nSEEN = os.environ.get('OMP_NUM_THREADS')\n"
    workers = mesh(threads_per_worker=2, preimport=(library("early_variables", source),))
    workers.wait_ready(NOT_HUNG_S)
    assert are_forked(workers)
    assert evaluated(workers, "torch.get_num_threads()") == [2, 2]
    assert evaluated(workers, "sys.modules['early_variables.module'].SEEN") == ["2", "2"]
    names = ("RANK", "OMP_NUM_THREADS", "MOREH_TEST_SET", "PYTORCH_NVML_BASED_CUDA_CHECK", "MOREH_TEST_TAKEN_AWAY")
    expected = [{**dict.fromkeys(names), "MOREH_TEST_SET": "at import", "OMP_NUM_THREADS": "2",
                 "MOREH_TEST_TAKEN_AWAY": "1", "RANK": rank} for rank in "01"]  # fmt: skip
    assert workers.submit(("environment", list(names))).result() == expected
    assert evaluated(workers, "os.path.realpath(os.readlink('/proc/self/fd/0'))") == [os.devnull] * 2
    assert evaluated(workers, "__import__('gc').isenabled()") == [True, True]
    assert evaluated(workers, "__import__('faulthandler').is_enabled()") == [True, True]
    assert len(set(evaluated(workers, "torch.initial_seed()"))) == 2
    assert len(set(evaluated(workers, "np.random.randint(2**31)"))) == 2
    assert len(set(evaluated(workers, "__import__('random').getrandbits(31)"))) == 2
    assert evaluated(workers, "__import__('threading').main_thread().is_alive()") == [True, True]


def test_workers_share_the_memory_of_what_they_import(mesh):
    workers = mesh()
    workers.wait_ready(NOT_HUNG_S)
    sizes = "dict(l.split()[:2] for l in open('/proc/self/smaps_rollup') if l.endswith('kB\\n'))"
    for kib in evaluated(workers, sizes):
        assert int(kib["Pss:"]) < 0.7 * int(kib["Rss:"])


def test_a_module_that_starts_a_thread_is_imported_by_each_worker(mesh, library):
    source = "import os, threading, time\nPID = os.getpid()\n"
    source += "threading.Thread(target=time.sleep, args=(3600,), name='of the module', daemon=True).start()\n"
    quiet = library("without_threads", "import os\nPID = os.getpid()\n")
    workers = mesh(preimport=(library("with_threads", source), quiet))
    workers.wait_ready(NOT_HUNG_S)
    assert are_forked(workers)
    deadline_s = time.monotonic() + NOT_HUNG_S
    module = "getattr(sys.modules.get('with_threads.module'), 'PID', None)"
    while evaluated(workers, module) != workers.pids:
        assert time.monotonic() < deadline_s
    names = "'of the module' in [each.name for each in __import__('threading').enumerate()]"
    assert evaluated(workers, names) == [True, True]
    (parent,) = parents(workers.pids)
    assert evaluated(workers, "sys.modules['without_threads.module'].PID") == [parent, parent]


def test_a_module_that_initializes_cuda_is_imported_by_each_worker(mesh, library):
    source = "import os, torch\nPID = os.getpid()\ntorch.cuda._is_in_bad_fork = lambda: os.getpid() != PID\n"
    workers = mesh(preimport=(library("initializes_cuda", source),))
    workers.wait_ready(NOT_HUNG_S)
    assert are_forked(workers)
    assert evaluated(workers, "__import__('initializes_cuda.module').module.PID") == workers.pids
    assert evaluated(workers, "torch.cuda._is_in_bad_fork()") == [False, False]


@pytest.mark.parametrize("raised", ["ImportError('no')", "SystemExit(3)"])
def test_a_module_that_cannot_be_imported_is_left_to_the_command_that_needs_it(mesh, library, raised):
    workers = mesh(preimport=(library("unimportable", f"raise {raised}\n"),))
    workers.wait_ready(NOT_HUNG_S)
    assert are_forked(workers)
    assert evaluated(workers, "'unimportable.module' in sys.modules") == [False, False]


def test_where_the_warm_parent_dies_while_it_imports_each_worker_imports(mesh, library):
    workers = mesh(preimport=(library("deadly", "import os\nif 'RANK' not in os.environ: os.abort()\n"),))
    workers.wait_ready(NOT_HUNG_S)
    assert parents(workers.pids) == {workers._launcher._agent.pid}
    assert evaluated(workers, "torch.ones(2).sum().item()") == [2.0, 2.0]


def test_what_the_script_imports_later_is_imported_once_too(mesh, library, monkeypatch):
    slow = library("slow_library", "import time\ntime.sleep(3)\n")
    later = library("later_library", "import os\nPID = os.getpid()\n", is_imported=False)
    workers = mesh(preimport=(slow, later, library("never_imported", "", is_imported=False)))
    deadline_s = time.monotonic() + NOT_HUNG_S
    while workers._launcher._agent is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    time.sleep(0.2)
    __import__("later_library")
    workers.wait_ready(NOT_HUNG_S)
    (parent,) = parents(workers.pids)
    assert evaluated(workers, "sys.modules['later_library.module'].PID") == [parent, parent]
    assert evaluated(workers, "'never_imported.module' in sys.modules") == [False, False]
    assert not [finder for finder in sys.meta_path if getattr(finder, "_name", "") == "never_imported"]


KILLED = {
    "worker": r"Worker 1 of 2 \(process \d+\) died: killed by signal 9",
    "client": r"Worker \d of 2 \(process \d+\) died: killed by signal 9",
    "warm parent": r"Worker \d of 2 \(process \d+\) died: killed by signal 9",
    "agent": r"The process that supervises the workers \(process \d+\) died: killed by signal 9",
}


@pytest.mark.parametrize("who", KILLED)
def test_no_process_is_left_whichever_is_killed(mesh, who):
    workers = mesh()
    children = workers.submit(("start_child",)).result(NOT_HUNG_S)
    supervisor = workers._launcher._agent.pid
    everyone = [supervisor, *descendants(supervisor)]
    assert {*workers.pids, *children} < set(everyone)
    clients = [pid for pid in everyone if "warm_client.py" in command_line(pid)]
    assert len(clients) == 2
    (parent,) = parents(workers.pids)
    reply = workers.submit(("sleep", 600))
    killed = {"worker": workers.pids[1], "client": clients[0], "warm parent": parent, "agent": supervisor}[who]
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=KILLED[who]):
        reply.result(NOT_HUNG_S)
    workers.close()
    wait_until_gone(everyone)


def test_the_client_ends_as_its_worker_does_and_passes_signals_on(mesh):
    workers = mesh()
    workers.wait_ready(NOT_HUNG_S)
    supervisor = workers._launcher._agent.pid
    clients = [pid for pid in descendants(supervisor) if "warm_client.py" in command_line(pid)]
    os.kill(clients[0], signal.SIGTERM)
    with pytest.raises(WorkerLostError, match=r"died: (killed by signal 15|exit code)"):
        workers.submit(("sleep", 600)).result(NOT_HUNG_S)
    wait_until_gone(clients)


@pytest.mark.parametrize("first", ["script", "agent"])
def test_a_script_that_is_killed_takes_them_all_along(tmp_path, first):
    path = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parent)])
    body = "import os\nprint(os.getpid(), flush=True)\nmesh.submit(('start_child',)).result()\n"
    body += "print(mesh._launcher._agent.pid, flush=True)\nimport time\ntime.sleep(600)\n"
    command = [sys.executable, "-c", SCRIPT.format(executor=EXECUTOR) + body]
    script = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)
    lines = [script.stdout.readline() for _ in range(3)]
    supervisor = int(lines[-1])
    everyone = [supervisor, *descendants(supervisor)]
    assert len(everyone) >= 1 + 1 + 3 * 3
    clients = [pid for pid in everyone if "warm_client.py" in command_line(pid)]
    (forks,) = [pid for pid in everyone if parents([pid]) == {supervisor} and pid not in clients]
    if first == "agent":
        script.send_signal(signal.SIGSTOP)  # it does not see that they are killed one after the other
        os.kill(supervisor, signal.SIGKILL)
        wait_until_gone(clients)
        assert is_there(forks), "what forks workers outlives their agent"
    script.kill()
    script.wait()
    wait_until_gone(everyone)
