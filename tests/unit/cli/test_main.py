"""`moreh-ap`: its commands, what it imports for each, and what belongs to a user's script."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moreh_ap.cli import main as program


def test_help_names_every_command_and_imports_none(capsys):
    with pytest.raises(SystemExit, match="0"):
        program.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for name, (_, purpose) in program.COMMANDS.items():
        assert f"{name} {purpose}" in said
    script = (
        "import sys\n"
        "from moreh_ap.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print(*(name for name in sys.modules if name.startswith('moreh_ap.') or name == 'torch'), file=sys.stderr)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    imported = set(found.stderr.split())
    assert not imported & {"torch", *(module for module, _ in program.COMMANDS.values())}


@pytest.mark.parametrize("name", program.COMMANDS)
def test_every_command_has_help_of_its_own(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        program.main([name, "--help"])
    assert f"moreh-ap {name}" in capsys.readouterr().out


def test_without_a_command_the_program_says_which_there_are(capsys):
    assert program.main([]) == program.USAGE_STATUS
    said = capsys.readouterr().err
    assert all(f"    {name} " in said for name in program.COMMANDS)


@pytest.mark.parametrize("arguments", [["no-such-command"], ["plan", "--no-such-flag"]])
def test_impossible_arguments_end_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        program.main(arguments)
    assert "usage: moreh-ap" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["host"], ["doctor"], ["plan", "Llama3-8B", "--devices", "2xH100"]])
def test_commands_that_run_no_script_take_no_command_line(command, capsys):
    assert program.main([*command, "--", "python", "train.py"]) == program.USAGE_STATUS
    assert "arguments after --: python train.py" in capsys.readouterr().err


def test_what_follows_two_dashes_is_the_scripts():
    split = program._before_and_after_dashes
    assert split(["verify", "train.py"]) == (["verify", "train.py"], [])
    assert split(["verify", "train.py", "--", "--lr", "--", "1"]) == (["verify", "train.py"], ["--lr", "--", "1"])


def test_what_follows_the_name_of_a_script_to_be_planned_is_the_scripts():
    split = program._before_and_after_dashes
    words = ["plan", "--devices", "8xH100", "train.py"]
    assert split([*words, "--devices", "2"]) == (words, ["--devices", "2"])
    assert split(["plan", "train.py", "--hosts", "4", "--", "--lr", "1"]) == (
        ["plan", "train.py", "--hosts", "4"],
        ["--lr", "1"],
    )
    assert split(["plan", "Llama3-8B", "--devices", "8xH100"]) == (["plan", "Llama3-8B", "--devices", "8xH100"], [])
