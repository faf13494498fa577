"""What Kubernetes is asked for so that a script runs on several hosts.

Decides the objects: a Secret by which the script and the agents recognise each other, a headless Service that names the
pods, a NetworkPolicy that keeps others away from them, and an Indexed Job with one pod a host. The first pod runs the
script, the others `moreh-ap host`. When the script ends, the job has succeeded or failed, and Kubernetes ends the other
pods with it: a StatefulSet would keep their devices. Must not know how pods find each other: that is `kubernetes.py`.

Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/ (success policy: on by default from 1.31)
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moreh_ap.hosts.clusters import kubernetes
from moreh_ap.hosts.credentials import AgentSecret

_LABEL = "moreh-ap.dev/job"
_GROUP = 2000  # members may read the secret, under any user of the image
_READABLE = 0o440
_GRACE_S = 10

_SECRET = kubernetes.SECRET_FOLDER
_START = f"""\
if [ "${kubernetes.INDEX_VARIABLE}" = 0 ]; then exec "$@"; fi
exec moreh-ap host --address "${kubernetes.ADDRESS_VARIABLE}" --port {kubernetes.PORT} --secret {_SECRET}
"""


@dataclass(frozen=True)
class KubernetesJob:
    """A script on several hosts.

    Attributes:
        name: Name of the job, of its service and of all else.
        nodes: Number of hosts.
        image: Image with Python, this package and the script.
        command: The script's command line.
        devices: GPUs of each host; 0: none.
        shared_memory: Size of /dev/shm, as Kubernetes writes it.
        resources: Other resources of each host, such as {"memory": "64Gi"}.
        folder: Where the command runs; empty: where the image says.
        claims: Volume claims and where each is mounted.
    """

    name: str
    nodes: int
    image: str
    command: Sequence[str]
    devices: int = 0
    shared_memory: str = "16Gi"
    resources: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    claims: Mapping[str, str] = field(default_factory=dict)


def manifests(job: KubernetesJob, secret: AgentSecret) -> list[dict[str, Any]]:
    """Returns the objects, in the order in which they are made."""
    labels = {_LABEL: job.name}
    meta = {"name": job.name, "labels": labels}
    coded = {name: base64.b64encode(text.encode()).decode() for name, text in secret.files().items()}
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": coded},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {
                "clusterIP": "None",  # a name for each pod
                "publishNotReadyAddresses": True,
                "selector": labels,
                "ports": [{"name": "agent", "port": kubernetes.PORT}],
            },
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": meta,
            "spec": {
                "podSelector": {"matchLabels": labels},
                "policyTypes": ["Ingress"],
                # Every port: NCCL and gloo choose theirs, and what they carry is not encrypted.
                "ingress": [{"from": [{"podSelector": {"matchLabels": labels}}]}],
            },
        },
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": _job(job, labels)},
    ]


def _job(job: KubernetesJob, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},  # the script's
        "template": {"metadata": {"labels": dict(labels)}, "spec": _pod(job)},
    }


def _pod(job: KubernetesJob) -> dict[str, Any]:
    claims = [(f"claim-{index}", *claim) for index, claim in enumerate(job.claims.items())]
    limits = {**({"nvidia.com/gpu": str(job.devices)} if job.devices else {}), **job.resources}
    variables = {
        "MOREH_HOSTS": "kubernetes",
        kubernetes.JOB_VARIABLE: job.name,
        kubernetes.NODES_VARIABLE: str(job.nodes),
        kubernetes.START_VARIABLE: f"{kubernetes.START_S:g}",
    }
    own_address = {"fieldRef": {"fieldPath": "status.podIP"}}
    container = {
        "name": "host",
        "image": job.image,
        "command": ["/bin/sh", "-c", _START, "sh"],
        "args": list(job.command),
        **({"workingDir": job.folder} if job.folder else {}),
        "env": [
            *({"name": name, "value": value} for name, value in variables.items()),
            {"name": kubernetes.ADDRESS_VARIABLE, "valueFrom": own_address},
        ],
        "ports": [{"name": "agent", "containerPort": kubernetes.PORT}],
        **({"resources": {"limits": limits}} if limits else {}),
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [
            {"name": "secret", "mountPath": kubernetes.SECRET_FOLDER, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *({"name": name, "mountPath": path} for name, _, path in claims),
        ],
    }
    return {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _GRACE_S,
        "securityContext": {"fsGroup": _GROUP},
        "containers": [container],
        "volumes": [
            {"name": "secret", "secret": {"secretName": job.name, "defaultMode": _READABLE}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory}},
            *({"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim, _ in claims),
        ],
    }
