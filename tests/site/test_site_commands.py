"""Every command on a page exists, and every flag in it is one that its program has."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from site_pages import DOCS, ROOT

PAGES = [*DOCS.rglob("*.md"), *(ROOT / "tutorials").rglob("README.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
TOOLS = dict(re.findall(r'^([\w-]+) = "(.*)"$', PROJECT.split("[project.scripts]\n")[1].split("\n\n")[0], re.MULTILINE))
STARTS = ("python ", "torchrun ", "make ", *(f"{tool} " for tool in TOOLS))
SHELLS = {"", "sh", "bash", "shell", "console"}
HELP_S = 30


def commands(page: Path) -> list[str]:
    """Returns the commands of a page, from blocks of shell and from code inside sentences, without variables."""
    lines, language = [], None
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        fence = re.match(r"[ ]*```[ ]*(\w*)", line)
        if fence:
            language = fence[1] if language is None else None
        elif language is None:
            lines += re.findall(r"`([^`]+)`", line)
        elif language in SHELLS:
            lines.append(line)
    found = [re.sub(r"^[$ ]*(?:\w+=\S+ )*", "", line) for line in lines]
    return [command for command in found if command.startswith(STARTS)]


ALL = sorted({(command, str(page.relative_to(ROOT))) for page in PAGES for command in commands(page)})


def test_pages_show_commands_of_every_kind():
    for start in ("python tutorials/", "python scripts/", "make ", "moreh-ap plan ", "moreh-ap verify "):
        assert any(command.startswith(start) for command, _ in ALL), start


@pytest.mark.parametrize("command, page", ALL, ids=lambda text: text)
def test_command_exists_and_has_its_flags(command, page):
    words = [word for word in shlex.split(command, comments=True) if not re.fullmatch(r"\w+=.*", word)]
    program, words = words[0], words[1:]
    words = words[: words.index("--")] if "--" in words else words
    if program == "make":
        assert set(words) - {"-n"} <= make_targets(), page
    elif program in TOOLS:
        subcommands: tuple[str, ...] = ()
        for word in itertools.takewhile(str.isalpha, words):
            if not re.search(rf"(?<![-\w]){word}(?![-\w])", help_of(program, subcommands)):
                break
            subcommands += (word,)
        own = itertools.takewhile(lambda word: not word.endswith(".py"), words)  # what follows a script is the script's
        check_flags(list(own), set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", help_of(program, subcommands))), page)
    else:
        check_script(program, words, page)


def check_script(program: str, words: list[str], page: str) -> None:
    """Asserts that a script of the repository exists and has the flags behind its name."""
    if words[0].startswith("-") and program == "python":
        for word in words:
            assert not word.startswith("tests/") or (ROOT / word).exists(), f"{page}: {word}"
        return
    at = next(place for place, word in enumerate(words) if word.endswith(".py"))
    script = ROOT / words[at]
    if words[at].startswith(("tutorials/", "scripts/", "tests/")):
        assert script.exists(), f"{page}: {words[at]}"
        known = written_flags(script)
        if "" in known and not flags_of(words[at + 1 :]) <= known:
            known = asked_flags(script)
        check_flags(words[at + 1 :], known, page)
    if program == "torchrun":
        check_flags(words[:at], torchrun_flags(), page)


def check_flags(words: list[str], known: set[str], page: str) -> None:
    """Asserts that everything that looks like a flag is known."""
    unknown = flags_of(words) - known - {"-h", "--help"}
    assert not unknown, f"{page}: {sorted(unknown)}"


def flags_of(words: list[str]) -> set[str]:
    """Returns what looks like a flag."""
    return {word.split("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}


@functools.cache
def make_targets() -> set[str]:
    """Returns the targets of the Makefile."""
    return set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@functools.cache
def help_of(program: str, subcommands: tuple[str, ...] = ()) -> str:
    """Returns what a console script of this package says when asked for help."""
    module, function = TOOLS[program].split(":")
    code = f"import sys; from {module} import {function} as run; sys.argv[0] = {program!r}; sys.exit(run())"
    asked = [sys.executable, "-c", code, *subcommands, "--help"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=HELP_S)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@functools.cache
def asked_flags(script: Path) -> set[str]:
    """Returns the flags that a script names when asked for help. Slow, since it imports torch."""
    asked = [sys.executable, str(script), "--help"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=HELP_S)
    assert answer.returncode == 0, answer.stderr
    return set(re.findall(r"--[a-z][\w-]*", answer.stdout))


@functools.cache
def written_flags(script: Path) -> set[str]:
    """Returns what the script, or a module beside it that it imports, gives to an argument parser; "" if computed."""
    flags = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            texts = {one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)}
            flags |= {text for text in texts if text.startswith("-")}
            flags |= set() if texts else {""}
            if "BooleanOptionalAction" in ast.unparse(node):
                flags |= {text.replace("--", "--no-", 1) for text in texts if text.startswith("--")}
        modules = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            beside = [folder / f"{module}.py" for folder in (script.parent, ROOT / "tutorials", ROOT / "scripts")]
            found = next((file for file in beside if file.exists() and file != script), None)
            flags |= written_flags(found) if found else set()
    return flags


@functools.cache
def torchrun_flags() -> set[str]:
    """Returns the flags of torchrun, with both spellings."""
    from torch.distributed.run import get_args_parser

    flags = set(get_args_parser()._option_string_actions)
    return flags | {flag[:2] + flag[2:].replace("_", "-") for flag in flags}
