"""What Kubernetes is asked for is valid, and its parts fit each other."""

from __future__ import annotations

import copy

import kubernetes_validate
import pytest

from moreh_ap.hosts.certificates import make_agent_secret
from moreh_ap.hosts.clusters import kubernetes
from moreh_ap.hosts.clusters.kubernetes_manifests import KubernetesJob, manifests

VERSIONS = ("1.31", "1.34")
SMALL = KubernetesJob("train", 2, "example/image:1", ["python", "train.py", "--lr", "1e-3"])
LARGE = KubernetesJob(
    "train-llama", 8, "example/image:1", ["python", "train.py"], devices=8, resources={"cpu": "64", "memory": "1Ti"},
    folder="/work", claims={"checkpoints": "/checkpoints", "data": "/data"},
)  # fmt: skip


@pytest.fixture(scope="module")
def secret():
    return make_agent_secret()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("job", [SMALL, LARGE], ids=["small", "large"])
def test_objects_are_valid(job, version, secret):
    made = manifests(job, secret)
    assert [one["kind"] for one in made] == ["Secret", "Service", "NetworkPolicy", "Job"]
    for one in made:
        kubernetes_validate.validate(one, version, strict=True)
    wrong = copy.deepcopy(made[-1])
    wrong["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_objects_belong_together(secret):
    stored, service, policy, job = manifests(LARGE, secret)
    labels, pod = job["spec"]["template"]["metadata"]["labels"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == labels
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts[kubernetes.SECRET_FOLDER]["secret"]["secretName"] == stored["metadata"]["name"]
    assert mounts["/data"]["persistentVolumeClaim"] == {"claimName": "data"}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "64", "memory": "1Ti"}
    assert container["workingDir"] == "/work" and container["args"] == ["python", "train.py"]
    variables = {one["name"]: one.get("value", "10.0.0.1") for one in container["env"]}
    pods = kubernetes.pods({**variables, "JOB_COMPLETION_INDEX": "0"})
    assert pods == [f"train-llama-{index}" for index in range(8)]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 8


def test_no_secret_is_outside_of_the_secret(secret):
    for one in manifests(SMALL, secret)[1:]:
        for content in secret.files().values():
            assert content.strip() not in str(one)
