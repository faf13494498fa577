"""`moreh-ap launch`: files that are written, sbatch that takes one, and what is refused."""

from __future__ import annotations

import os
import subprocess

import kubernetes_validate
import pytest
import yaml

from moreh_ap.cli import launch_command
from moreh_ap.cli import main as program

COMMAND = ("--", "python", "train.py", "--note", 'it\'s "1 $x"')


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sbatch(monkeypatch, here, text):
    (here / "bin").mkdir()
    path = here / "bin" / "sbatch"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


def test_a_batch_script_is_written_and_submitted(monkeypatch, here, capsys):
    sbatch(monkeypatch, here, 'echo "Submitted batch job 7 $@"')
    given = ("--nodes", "8", "--devices-per-node", "4", "--option=--partition=gpu", "--option=--time=1:00:00")
    assert program.main(["launch", "slurm", *given, *COMMAND]) == 0
    assert capsys.readouterr().out == "Submitted batch job 7 train.sbatch\n"
    lines = (here / "train.sbatch").read_text().splitlines()
    assert lines[0] == "#!/bin/sh"
    for option in ("--nodes=8", "--gpus-per-node=4", "--partition=gpu", "--time=1:00:00", "--job-name=train"):
        assert f"#SBATCH {option}" in lines
    assert lines[-2] == "export MOREH_HOSTS=slurm"


def test_the_command_line_arrives_as_it_was_given(here):
    (here / "python").write_text('#!/bin/sh\necho "$MOREH_HOSTS"; for word; do echo "$word"; done\n')
    (here / "python").chmod(0o755)
    assert program.main(["launch", "slurm", "--nodes", "2", "--dry-run", *COMMAND]) == 0
    assert program.main(["launch", "slurm", "--nodes", "2", "--write", "other.sbatch", *COMMAND]) == 0
    assert (here / "other.sbatch").read_text() == (here / "train.sbatch").read_text()
    environment = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "train.sbatch"], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["slurm", *COMMAND[2:]]


def test_what_slurm_says_is_passed_on(monkeypatch, here, capsys):
    sbatch(monkeypatch, here, "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    assert program.main(["launch", "slurm", "--nodes", "2", *COMMAND]) == program.USAGE_STATUS
    assert "sbatch train.sbatch: sbatch: error: invalid partition specified: gpu" in capsys.readouterr().err


def test_manifests_are_written_for_their_owner_only(here, capsys):
    (here / "train.yaml").write_text(f"# {launch_command._MARK}\n")
    (here / "train.yaml").chmod(0o644)
    given = ("--nodes", "2", "--image", "example/image:1", "--claim", "checkpoints:/data", "--memory", "8Gi")
    assert program.main(["launch", "kubernetes", *given, *COMMAND]) == 0
    said = capsys.readouterr().out
    assert "kubectl apply -f train.yaml" in said
    assert (here / "train.yaml").stat().st_mode & 0o777 == 0o600
    text = (here / "train.yaml").read_text()
    made = list(yaml.safe_load_all(text))
    for one in made:
        kubernetes_validate.validate(one, "1.31", strict=True)
    assert "&id" not in text
    container = made[-1]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == list(COMMAND[1:])
    for secret in made[0]["data"].values():
        assert secret not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["slurm", "--nodes", "2"], "No command follows after --"),
        (["slurm", "--nodes", "0", *COMMAND], "--nodes 0"),
        (["slurm", "--nodes", "2", "--devices-per-node", "-1", *COMMAND], "--devices-per-node -1"),
        (["slurm", "--nodes", "2", "--name", "Ünter", *COMMAND], "--name Ünter"),
        (["slurm", "--nodes", "2", "--option=-p gpu\nreboot", *COMMAND], "--option="),
        (["kubernetes", "--nodes", "2", "--image", "i", "--claim", "data", *COMMAND], "--claim data"),
        (["kubernetes", "--nodes", "2", "--image", "i", "--write", "no/folder.yaml", *COMMAND], "no/folder.yaml"),
        (["slurm", "--nodes", "2", "--write", "mine.sh", *COMMAND], "mine.sh exists, and was not written"),
    ],
)
def test_impossible_arguments_are_refused_and_change_nothing(arguments, said, here, capsys):
    (here / "mine.sh").write_text("echo mine\n")
    assert program.main(["launch", *arguments]) == program.USAGE_STATUS
    assert said in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["mine.sh"] and (here / "mine.sh").read_text() == "echo mine\n"


@pytest.mark.parametrize(
    ("command", "name"),
    [(["python", "Train_Llama 3.py"], "train-llama-3"), (["./run"], "run"), (["python", "-m", "a.b"], "python")],
)
def test_a_job_has_the_name_of_its_script(command, name):
    assert launch_command._name_of(command) == name
