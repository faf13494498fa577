"""`moreh-ap launch`: runs a script on several hosts by a Slurm job, or writes what Kubernetes is asked for.

Decides the command's arguments, which file is written, and that no other file is lost. Must not know what is in it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import yaml

from moreh_ap.errors import OptionError
from moreh_ap.hosts.certificates import make_agent_secret
from moreh_ap.hosts.clusters import slurm
from moreh_ap.hosts.clusters.kubernetes_manifests import KubernetesJob, manifests

_MARK = "written by moreh-ap launch"
_LONGEST_NAME = 50  # of a pod's name 63 characters remain for its number. Source: RFC 1123
_FIRST_POD = "batch.kubernetes.io/job-completion-index=0"  # it runs the script
_LINK = "docs/several-machines.md"
_EXAMPLE = {
    "slurm": "moreh-ap launch slurm --nodes 2 -- python train.py",
    "kubernetes": "moreh-ap launch kubernetes --nodes 2 --image IMAGE -- python train.py",
}


class _PlainDumper(yaml.SafeDumper):
    """Writes what occurs twice twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = __doc__.split("\n\n")[0]
    parser.epilog = "The script's command line follows after --."
    launchers = parser.add_subparsers(dest="launcher", required=True)
    by_slurm = launchers.add_parser("slurm", help="write a batch script and submit it")
    by_kubernetes = launchers.add_parser("kubernetes", help="write manifests for kubectl")
    for one, ending in ((by_slurm, "sbatch"), (by_kubernetes, "yaml")):
        one.add_argument("--nodes", type=int, required=True, metavar="N", help="hosts")
        one.add_argument("--name", metavar="NAME", help="of the job (default: the script's)")
        one.add_argument("--devices-per-node", type=int, default=0, metavar="N", help="GPUs of each host to ask for")
        one.add_argument("--write", type=Path, metavar="FILE",
                         help=f"write this file, and submit nothing (default: NAME.{ending})")  # fmt: skip
    by_slurm.add_argument("--option", action="append", default=[], metavar="OPTION",
                          help="of sbatch, such as --option=--partition=gpu; may be repeated")  # fmt: skip
    by_slurm.add_argument("--dry-run", action="store_true", help="write the batch script, and submit nothing")
    by_kubernetes.add_argument("--image", required=True, help="with Python, this package and the script")
    by_kubernetes.add_argument("--workdir", default="", metavar="FOLDER", help="where the command runs in the image")
    by_kubernetes.add_argument("--claim", action="append", default=[], metavar="NAME:/PATH",
                               help="volume claim to mount in every pod; may be repeated")  # fmt: skip
    by_kubernetes.add_argument("--cpus", default="", metavar="N", help="cores of each host")
    by_kubernetes.add_argument("--memory", default="", metavar="SIZE", help="of each host, such as 64Gi")
    by_kubernetes.add_argument("--shm", default="16Gi", metavar="SIZE", help="of /dev/shm (default 16Gi)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, script_arguments: list[str]) -> int:
    """Writes the file, submits it if it is Slurm's, and returns the exit status.

    Raises:
        OptionError: An argument is impossible, the file belongs to another user, or sbatch does not take it.
    """
    example = _EXAMPLE[arguments.launcher]
    if not script_arguments:
        raise OptionError("No command follows after --", "the script's command line", example, _LINK)
    for name, least in (("nodes", 1), ("devices_per_node", 0)):
        value = getattr(arguments, name)
        if value < least:
            raise OptionError(f"--{name.replace('_', '-')} {value}", f"at least {least}", example, _LINK)
    name = arguments.name or _name_of(script_arguments)
    if len(name) > _LONGEST_NAME or not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name):
        allowed = f"at most {_LONGEST_NAME} small letters, digits and dashes, a letter first"
        raise OptionError(f"--name {name}", allowed, example.replace(" --nodes", " --name train --nodes"), _LINK)
    if arguments.launcher == "slurm":
        return _slurm(arguments, name, script_arguments)
    return _kubernetes(arguments, name, script_arguments)


def _slurm(arguments: argparse.Namespace, name: str, command: list[str]) -> int:
    devices = [f"--gpus-per-node={arguments.devices_per_node}"] if arguments.devices_per_node else []
    for option in arguments.option:
        if not re.fullmatch(r"-[^\n]+", option):
            raise OptionError(f"--option={option!r}", "an option of sbatch", "--option=--partition=gpu", _LINK)
    text = slurm.batch_script(name, arguments.nodes, command, [*devices, *arguments.option])
    shell, _, rest = text.partition("\n")
    path = arguments.write or Path(f"{name}.sbatch")
    _write(path, f"{shell}\n# {_MARK}\n{rest}", 0o644)
    if arguments.dry_run or arguments.write is not None:
        print(f"{path} is written. To submit it:\nsbatch {path}")
        return 0
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
    except OSError as error:
        raise OptionError(f"sbatch {path}: {error}", "a machine with Slurm's programs", f"sbatch {path}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        fix = f"sbatch --test-only {path}  # then moreh-ap launch slurm --option=..., with what the cluster has"
        raise OptionError(f"sbatch {path}: {said}", "what the cluster has", fix, _LINK)
    print(done.stdout.strip())
    return 0


def _kubernetes(arguments: argparse.Namespace, name: str, command: list[str]) -> int:
    resources = {"cpu": arguments.cpus, "memory": arguments.memory}
    job = KubernetesJob(
        name=name,
        nodes=arguments.nodes,
        image=arguments.image,
        command=command,
        devices=arguments.devices_per_node,
        shared_memory=arguments.shm,
        resources={what: size for what, size in resources.items() if size},
        folder=arguments.workdir,
        claims=dict(_claims(arguments.claim)),
    )
    path = arguments.write or Path(f"{name}.yaml")
    text = yaml.dump_all(manifests(job, make_agent_secret()), Dumper=_PlainDumper, sort_keys=False, width=120)
    _write(path, f"# {_MARK}; has a key: keep it to yourself, or remove it once it is applied\n{text}", 0o600)
    print(f"{path} is written. Keep it private: it contains a key. To start, to watch and to remove the job:")
    watch = f"kubectl logs --follow --selector {_FIRST_POD},job-name={name}"
    print(f"kubectl apply -f {path}\n{watch}\nkubectl delete -f {path}")
    return 0


def _claims(given: Iterable[str]) -> Iterable[tuple[str, str]]:
    for claim in given:
        found = re.fullmatch(r"([a-z0-9.-]+):(/.+)", claim)
        if found is None:
            raise OptionError(f"--claim {claim}", "a claim's name and a path", "--claim checkpoints:/data", _LINK)
        yield found[1], found[2]


def _name_of(command: list[str]) -> str:
    """Returns a job's name: that of the script, in letters that names may have."""
    script = next((word for word in command if word.endswith(".py")), command[0])
    return re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:_LONGEST_NAME].rstrip("-")


def _write(path: Path, text: str, mode: int) -> None:
    """Writes a file that only its owner may change, in place of an earlier one of this command.

    Raises:
        OptionError: The file there is another one, or cannot be written.
    """
    fix = f"--write {path.with_name('launch-' + path.name)}"
    try:
        if path.exists() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
            raise OptionError(f"{path} exists, and was not written by this command", "another file", fix, _LINK)
        path.unlink(missing_ok=True)  # users who could read it cannot read its replacement
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OptionError(f"{path}: {error}", "a file that can be written", fix, _LINK) from error
