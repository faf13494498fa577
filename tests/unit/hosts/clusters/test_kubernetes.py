"""The pods of a Kubernetes job, where there is no Kubernetes."""

from __future__ import annotations

import pytest

from moreh_ap.errors import MeshStartError, OptionError
from moreh_ap.hosts.certificates import make_agent_secret
from moreh_ap.hosts.clusters import kubernetes
from moreh_ap.hosts.host_list import by_hand, parse_hosts, public_name

ENVIRONMENT = {
    "MOREH_KUBERNETES_JOB": "train",
    "MOREH_KUBERNETES_NODES": "3",
    "POD_IP": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "0",
}


def test_the_hosts_are_the_pods_of_the_job(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    hosts = parse_hosts("kubernetes")
    assert hosts == ("kubernetes:train-0", "kubernetes:train-1", "kubernetes:train-2")
    assert public_name(hosts[2]) == "train-2" and kubernetes.own_pod(ENVIRONMENT) == "train-0"


@pytest.mark.parametrize("missing", ENVIRONMENT)
def test_a_process_outside_of_a_job_is_told_so(missing):
    with pytest.raises(OptionError, match=f"{missing} is not set"):
        kubernetes.pods({name: value for name, value in ENVIRONMENT.items() if name != missing})


def test_another_pod_than_the_first_runs_no_script():
    with pytest.raises(OptionError, match="pod 1 of 3"):
        kubernetes.pods({**ENVIRONMENT, "JOB_COMPLETION_INDEX": "1"})


def test_an_agent_is_recognised_by_the_mounted_secret(tmp_path, monkeypatch):
    secret = make_agent_secret()
    for name, content in secret.files().items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(kubernetes, "SECRET_FOLDER", str(tmp_path))
    line = kubernetes.line_of("train-1", ENVIRONMENT)
    assert by_hand(line)[:2] == ("train-1.train", kubernetes.PORT)
    assert line == secret.line("train-1.train", kubernetes.PORT) and secret.token in line
    assert secret.token not in repr(secret) and secret.key not in repr(secret)


def test_pods_that_do_not_start_are_named(monkeypatch, capsys):
    asked = []

    def reaches(name, port):
        asked.append(name)
        return "" if name == "train-1.train" and asked.count(name) > 1 else "Name or service not known"

    monkeypatch.setattr(kubernetes.reachability, "reaches", reaches)
    monkeypatch.setattr(kubernetes, "_AGAIN_S", 0.01)
    pods = ["train-0", "train-1", "train-2"]
    with pytest.raises(MeshStartError) as caught:
        kubernetes.await_agents(pods, {**ENVIRONMENT, "MOREH_KUBERNETES_START_S": "0.2"})
    assert "The agents of train-2 do not listen after 0.2 s: Name or service" in caught.value.fact
    assert "train-0.train" not in asked, "its agent is started by the script"
    assert capsys.readouterr().err == "[info] waiting until these pods have started: train-1, train-2\n"
    kubernetes.await_agents(pods[:2], ENVIRONMENT)
