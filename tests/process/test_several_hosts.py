"""Several hosts: the numbers of one process under every kind of plan, what a host does not have, and every kind of end.

Two hosts with two workers each, as network namespaces with a real sshd; without root, `ip` or sshd two agents that were
started by hand on loopback, and only the tests that need no more.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hosts_lab import ADDRESSES, MISSING, MISSING_FOR_SLURM, Lab, loopback_agents, output_until, said_by

import moreh_ap
from moreh_ap.session.checkpoint.folder_lock import LOCK_FILE

SCRIPTS = Path(__file__).parent / "scripts"
PLANS = ("replicate=4", "shard=4", "tensor=2,replicate=2", "pipeline=2,replicate=2")
SAVED_BY = (0, 2)  # of each stage of the last plan, the first replica

pytestmark = pytest.mark.rotating  # one more way to reach hosts, or to end, each; they take a minute each

needs_lab = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")


def assert_equal_runs(got, expected):
    """Losses to 1e-5 and weights to 1e-4, relative."""
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert_equal_weights(got[1], expected[1])


def assert_equal_weights(got, expected):
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        difference = (got[name] - weight).abs().max() / weight.abs().max().clamp(min=1e-12)
        assert difference < 1e-4, name


def loaded_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns what one process, this one, loads of a checkpoint."""
    model = runpy.run_path(str(SCRIPTS / "several_hosts_model.py"))["small_llama"]()
    moreh_ap.load(checkpoint, model=model)
    return model.state_dict()


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two agents that were started by hand on loopback, each of which serves one script after the other."""
    with loopback_agents(tmp_path_factory.mktemp("agents")) as hosts:
        yield hosts


def run_by_hand(command: list, hosts: str, cache: Path, **variables: str) -> subprocess.CompletedProcess:
    """Runs a script on agents that were started by hand."""
    own = {"OMP_NUM_THREADS": "1", "MOREH_AP_CACHE": str(cache), "MOREH_HOSTS": hosts}
    return subprocess.run(command, env={**os.environ, **own, **variables}, capture_output=True, text=True, timeout=200)


IMPORTS_AFTER_THE_LINE = """
import pathlib, sys, torch
torch.moreh.option.enable_advanced_parallelization(devices=4)
sys.path.insert(0, str(pathlib.Path(__file__).parent / "models"))
from several_hosts import train_on_hosts
train_on_hosts(*sys.argv[1:])
"""


@needs_lab
def test_numbers_of_one_process_by_ssh_with_a_script_and_a_model_that_one_host_lacks(lab, alone):
    folder = lab.private / "project"
    modules = folder / "models"
    modules.mkdir(parents=True)
    for name in ("several_hosts.py", "several_hosts_model.py"):
        shutil.copy(SCRIPTS / name, modules)
    (folder / "train.py").write_text(IMPORTS_AFTER_THE_LINE)
    results, checkpoint = lab.shared / "results", lab.private / "checkpoint"
    temporary = lab.private / "tmp"
    temporary.mkdir()
    arguments = folder / "train.py", results, checkpoint, *PLANS
    code, said = lab.run(*arguments, cwd=folder, TMPDIR=str(temporary), timeout_s=190)
    assert code == 0, said
    assert lab.wait_until_empty() == {}
    saved = (path.name for path in checkpoint.iterdir() if path.name != LOCK_FILE)
    kinds = sorted(name.partition("-")[2] or name for name in saved)
    assert kinds == ["checkpoint.json", *(f"worker{rank}.safetensors" for rank in SAVED_BY)]  # host b does not share it
    found = torch.load(results)
    for plan in PLANS:
        assert_equal_runs(found[plan], alone)
    assert_equal_weights(found["loaded"][1], found[PLANS[-1]][1])  # by the workers of all hosts
    assert_equal_weights(loaded_weights(checkpoint), found[PLANS[-1]][1])  # in one process
    one_host = {"MOREH_HOSTS": ADDRESSES["b"]}
    script = modules / "several_hosts.py"
    code, more = lab.run(script, lab.shared / "one", checkpoint, "load", cwd=modules, timeout_s=90, **one_host)
    assert code == 0, more
    assert_equal_weights(torch.load(lab.shared / "one")["loaded"][1], found[PLANS[-1]][1])  # on one host
    sent = [line for line in said.splitlines() if "[info] sent to " in line]
    assert any(f"sent to {ADDRESSES['b']}: {modules}/several_hosts_model.py" in line for line in sent), said
    assert any(line.endswith("bytes)") and ".safetensors" in line for line in sent), said
    assert not any(ADDRESSES["a"] in line for line in sent), "host a shares the folder"


def test_numbers_of_one_process_by_hand_and_messages_that_do_not_grow_with_the_workers_of_a_host(
    by_hand, alone, tmp_path
):
    plan, results = "tensor=2,replicate=2", tmp_path / "results"
    command = [os.sys.executable, SCRIPTS / "several_hosts_messages.py", results, tmp_path / "checkpoint", plan]
    done = run_by_hand(command, by_hand, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in Path(by_hand).read_text().split():
        assert line.rpartition("/")[2] not in done.stdout + done.stderr, "the token is a secret"
    found = torch.load(results)
    assert_equal_runs(found[plan], alone)
    assert_equal_weights(loaded_weights(tmp_path / "checkpoint"), found[plan][1])
    counts = re.findall(r"workers (\d) messages (\d+) (\d+) (\d+)", done.stdout)
    assert [workers for workers, *_ in counts] == ["2", "4"]
    for _, messages, sent, received in counts:
        assert int(messages) >= 20
        assert int(sent) == int(received) == 2 * int(messages), "one to each host, and one back"


@pytest.mark.parametrize("wrong", ["none", "forward"])
def test_first_steps_are_compared_with_one_device_on_the_script_s_machine(by_hand, tmp_path, wrong):
    command = [os.sys.executable, SCRIPTS / "first_steps.py", "--plan", "replicate=2"]
    done = run_by_hand(command + (["--wrong", wrong] if wrong != "none" else []), by_hand, tmp_path, MOREH_CHECK="2")
    if wrong == "none":
        assert "MOREH_CHECK=2: 2 steps compared with one device: outputs within" in done.stdout, done.stderr
        assert done.returncode == 0
    else:
        assert "differs on 2 devices and on one" in done.stderr and done.returncode == 1


def test_a_file_that_one_host_lacks_is_named_with_the_host_although_the_others_wait_for_it(by_hand, tmp_path):
    done = run_by_hand([os.sys.executable, SCRIPTS / "lacks_a_file.py"], by_hand, tmp_path)
    assert done.returncode == 1 and "will never end" not in done.stderr, done.stderr
    assert "\nFileNotFoundError: [Errno 2] No such file or directory: '/nowhere/words.txt'" in done.stderr, done.stderr
    assert re.search(r"in worker 1 on 127\.0\.0\.1:\d+:\nTraceback", done.stderr), done.stderr


@pytest.mark.skipif(bool(MISSING_FOR_SLURM), reason=f"needs {', '.join(MISSING_FOR_SLURM)}")
def test_numbers_of_one_process_inside_of_a_slurm_job(lab, alone):
    plan, results = "shard=2,replicate=2", lab.shared / "slurm-results"
    slurm, script = lab.start_slurm(), SCRIPTS / "several_hosts.py"
    within = ("salloc", "--nodes=2", "--quiet")
    code, said = lab.run(script, results, lab.shared / "slurm-checkpoint", plan, within=within, **slurm)
    assert code == 0, said
    assert "(mlaba:0)" in said and "(mlabb:1)" in said
    assert lab.wait_until_empty() == {}
    assert_equal_runs(torch.load(results)[plan], alone)
    code, said = lab.run("-m", "moreh_ap.cli.main", "doctor", "--hosts", "slurm", **slurm)
    assert code == 2 and "this process runs in no Slurm job" in said


@needs_lab
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_script_leaves_nothing_on_any_host_and_keys_are_in_memory_alone(lab, how):
    script = lab.start(SCRIPTS / "several_hosts_forever.py")
    said = output_until(script, f"[{ADDRESSES['b']}, worker 3] rank 3 of 4")
    assert "\nrank 0 of 4\n" in said and said.count("forward begins") == 1, "what all print is shown once"
    for host in "ab":
        forked = [pid for pid in lab.processes(host) if "warm_program" in _command(pid)]
        workers = [pid for pid in forked if Path(f"/proc/{pid}/comm").read_text().startswith("moreh-worker-")]
        assert len(workers) == 2
        rest = [pid for pid in forked if pid not in workers]  # what imports PyTorch once, and a copy that imports more
        roots = [
            pid for pid in rest if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) not in rest
        ]
        assert len(roots) == 1 and len(rest) <= 2, "what imports PyTorch once for this host, and a copy of it"
    try:
        _assert_no_key_can_be_read(lab)
    finally:
        script.send_signal(how)
    script.wait(10)
    assert lab.wait_until_empty() == {}
    assert list(Path("/tmp").glob(f"moreh-{script.pid}-*")) == []


@needs_lab
def test_moreh_smi_shows_all_hosts_and_a_lost_one_is_named_and_ends_the_script(lab):
    script = lab.start(SCRIPTS / "several_hosts_forever.py", MOREH_RECOVERY="off")
    output_until(script, "step 5")
    shown = _shown_by_moreh_smi(lab)
    of_hosts = [(one["rank"], one["host"], one["pid"] in lab.processes("ab"[one["rank"] // 2])) for one in shown]
    assert of_hosts == [(rank, ADDRESSES["ab"[rank // 2]], True) for rank in range(4)]
    assert all(one["used_bytes"] > 2**26 and one["utilization_percent"] > 0 for one in shown), shown
    (agent,) = [pid for pid in lab.processes("b") if "remote_agent" in _command(pid) and _is_agent(pid, lab)]
    os.kill(agent, signal.SIGKILL)
    said = said_by(script, 30)
    assert script.returncode == 1, said
    assert f"WorkerLostError: The host {ADDRESSES['b']} is lost, and the workers on it (2, 3)" in said
    assert lab.wait_until_empty() == {}


@needs_lab
def test_a_large_batch_travels_once_to_each_host_and_a_cut_link_is_a_lost_host(lab):
    script = lab.start(SCRIPTS / "several_hosts_bytes.py", MOREH_RECOVERY="off")
    said = output_until(script, "done")
    counts = [(int(sent), int(size)) for sent, size in re.findall(r"sent (\d+) of (\d+)", said)]
    assert len(counts) == 3
    for sent, size in counts:
        assert 2 * size < sent < 2.1 * size, "two hosts; each worker of the first would make it three"
    cut = ["ip", "-n", lab.namespace("sw"), "link", "set", "vb"]
    subprocess.run([*cut, "down"], check=True)
    start_s = time.monotonic()
    try:
        said = said_by(script, 60)
        assert time.monotonic() - start_s < 30, "ssh notices in 10 s"
        assert f"WorkerLostError: The host {ADDRESSES['b']} is lost" in said
    finally:
        subprocess.run([*cut, "up"], check=True)
    assert lab.wait_until_empty(20.0) == {}, "the other host at once, this one when it hears of the controller's end"


@needs_lab
def test_the_doctor_says_within_ten_seconds_which_host_cannot_join(lab):
    start_s = time.monotonic()
    code, said = lab.run("-m", "moreh_ap.cli.main", "doctor", "--hosts", lab.hosts, timeout_s=30, COLUMNS="200")
    assert code == 0 and time.monotonic() - start_s < 10, said
    links = ("link from here", "link to the next host", "MB/s", f"({ADDRESSES['b']})")
    facts = (f"eth0 {ADDRESSES['a']}", f"eth0 {ADDRESSES['b']}", "torchmonarch", "reaches controller", "clock")
    for word in links + facts:
        assert word in said
    missing = f"{lab.hosts},10.78.0.9"
    start_s = time.monotonic()
    code, said = lab.run("-m", "moreh_ap.cli.main", "doctor", "--hosts", missing, timeout_s=30, COLUMNS="200")
    assert code == 1 and time.monotonic() - start_s < 12, said
    assert "10.78.0.9, answer: ssh 10.78.0.9 true" in said and "✗ ssh: connect to host 10.78.0.9" in said
    line = "import torch; torch.moreh.option.enable_advanced_parallelization()"
    code, said = lab.run("-c", line, MOREH_HOSTS=missing)
    assert code == 1 and "MeshStartError: The host 10.78.0.9 cannot join: answer: ssh: connect to host" in said
    assert lab.wait_until_empty() == {}


def _assert_no_key_can_be_read(lab: Lab) -> None:
    """No command line, environment or file has one."""
    for pid in [*lab.processes("a"), *lab.processes("b"), *lab.processes("c")]:
        for name in ("cmdline", "environ"):
            content = Path(f"/proc/{pid}/{name}").read_bytes()
            assert b"PRIVATE KEY" not in content, (pid, name)
        assert b"HYPERACTOR_TLS" not in Path(f"/proc/{pid}/environ").read_bytes()
    for folder in Path("/tmp").glob("moreh-*"):
        for path in folder.rglob("*"):
            if path.is_file() and lab.folder not in path.parents:
                assert b"PRIVATE KEY" not in path.read_bytes()


def _shown_by_moreh_smi(lab: Lab) -> list[dict]:
    """Returns the workers in its JSON once all of them were looked at twice."""
    deadline_s = time.monotonic() + 60.0
    while True:
        code, said = lab.run("-m", "moreh_ap.toolkit.smi", "--json")
        assert code == 0, said
        workers = [worker for job in json.loads(said)["jobs"] for worker in job["workers"]]
        if len(workers) == 4 and all(worker["utilization_percent"] for worker in workers):
            return workers
        assert time.monotonic() < deadline_s, said


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _is_agent(pid: int, lab: Lab) -> bool:
    """Returns whether a process is the agent itself, not one that it started."""
    status = Path(f"/proc/{pid}/status").read_text()
    parent = int(status.split("PPid:")[1].split()[0])
    return parent not in lab.processes("b")
