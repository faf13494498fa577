"""`moreh-ap launch`: a real Slurm takes the batch script, and pods do what the manifests say.

Kubernetes itself is not there: each pod is a namespaced host on which the manifests' own command, arguments,
environment and mounted secret are executed, under the name that the service would give it.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from hosts_lab import ADDRESSES, MISSING, MISSING_FOR_SLURM, Lab
from test_several_hosts import SCRIPTS, assert_equal_runs

pytestmark = pytest.mark.rotating  # one more way to start

PLAN = "tensor=2,replicate=2"
POD = """\
mount -t tmpfs none /run && mkdir -p "$1" && cp -r "$2"/. "$1" && chmod -R "$3" "$1"/* || exit 9
shift 3
exec "$@"
"""


@pytest.mark.skipif(bool(MISSING_FOR_SLURM), reason=f"needs {', '.join(MISSING_FOR_SLURM)}")
def test_slurm_runs_what_was_launched(lab, alone):
    slurm, results = lab.start_slurm(), lab.shared / "launched-results"
    script = [sys.executable, SCRIPTS / "several_hosts.py", results, lab.shared / "launched-checkpoint", PLAN]
    launch = ("-m", "moreh_ap.cli.main", "launch", "slurm", "--nodes", "2", "--name", "train")
    code, said = lab.run(*launch, "--", *script, SLURM_CONF=slurm["SLURM_CONF"], MOREH_HOSTS="")
    assert code == 0 and "Submitted batch job" in said, said
    log = lab.shared / f"train-{said.split()[-1]}.log"
    deadline_s = time.monotonic() + 200
    while not results.exists() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert results.exists(), log.read_text() if log.exists() else "no log"
    assert lab.wait_until_empty(20.0) == {}, "the script has written its results and ends"
    printed = log.read_text()
    assert "(mlaba:0)" in printed and "(mlabb:1)" in printed, printed
    assert_equal_runs(torch.load(results)[PLAN], alone)


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
def test_pods_do_what_the_manifests_say(lab, alone):
    results, manifests = lab.shared / "pod-results", lab.shared / "train.yaml"
    script = [sys.executable, SCRIPTS / "several_hosts.py", results, lab.shared / "pod-checkpoint", PLAN]
    launch = ("-m", "moreh_ap.cli.main", "launch", "kubernetes", "--nodes", "2", "--image", "example/image:1")
    code, said = lab.run(*launch, "--name", "train", "--write", manifests, "--", *script)
    assert code == 0, said
    objects = {one["kind"]: one for one in yaml.safe_load_all(manifests.read_text())}
    service, job = objects["Service"]["metadata"]["name"], objects["Job"]["metadata"]["name"]
    hosts = dict(enumerate("ab"))
    lab.name_hosts({f"{job}-{index}.{service}": ADDRESSES[host] for index, host in hosts.items()})
    agent = start_pod(lab, objects, 1, hosts[1])
    first = start_pod(lab, objects, 0, hosts[0])
    try:
        printed, _ = first.communicate(timeout=200)
        assert first.returncode == 0, printed
        assert "(train-0:0)" in printed and "(train-1:1)" in printed, printed
        assert_equal_runs(torch.load(results)[PLAN], alone)
        assert agent.poll() is None, "it waits for the next script"
        agent.send_signal(signal.SIGTERM)  # as Kubernetes does once the job has succeeded
        agents_words, _ = agent.communicate(timeout=10)
        assert agent.returncode == 0
    finally:
        for pod in (first, agent):
            pod.kill()
            pod.wait()
    token = base64.b64decode(objects["Secret"]["data"]["token"]).decode()
    assert agents_words == f"listening at {ADDRESSES['b']}:26600\n" and token not in printed
    assert lab.wait_until_empty() == {}


def start_pod(lab: Lab, objects: dict[str, dict], index: int, host: str) -> subprocess.Popen:
    """Starts what the manifests say is to run in a pod, with its environment and its secret."""
    pod = objects["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (volume,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert volume["secretName"] == objects["Secret"]["metadata"]["name"]
    (where,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "secret"]
    content = lab.folder / f"secret-{index}"
    content.mkdir()
    for name, text in objects["Secret"]["data"].items():
        (content / name).write_bytes(base64.b64decode(text))
    fields = {"status.podIP": ADDRESSES[host]}
    variables = {one["name"]: one.get("value") or fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
                 for one in container["env"]}  # fmt: skip
    image = {name: value for name, value in lab.environment().items() if not name.startswith("MOREH_HOSTS")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the program `moreh-ap` is installed there
    mode = f"{volume['defaultMode']:o}"
    return subprocess.Popen(
        ["ip", "netns", "exec", lab.namespace(host), "sh", "-c", POD, "sh", where, content, mode,
         *container["command"], *container["args"]],
        env={**image, "PATH": path, **variables, "JOB_COMPLETION_INDEX": str(index)},
        cwd=lab.shared, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
