"""Every name of torch that this package uses is in the oldest torch that it accepts, and in the one installed here."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]

SOURCES = {
    "torch/__init__.py": """
        from typing import TYPE_CHECKING
        from . import nn as nn
        from .shapes import *
        from ._guts import hidden as shown, Machine
        import torch.fast
        if TYPE_CHECKING:
            def only_for_types(): ...
        else:
            only_at_run_time = 1
        try:
            from _missing import speed
        except ImportError:
            speed = None
        for name in (1, 2):
            counted = name
        machine = Machine()
        engine_class = Machine
        with open("x") as opened:
            def inside(a, b=1, *more, c, **rest): ...
    """,
    "torch/shapes.py": """
        from torch._guts import *
        __all__ = ["square"]
        __all__ += ["circle"]
        __all__.append("line")
        def square(size, *, colour=None): ...
        def square(size, dtype): ...
        circle, line, left_out = 1, 2, 3
    """,
    "torch/_guts.py": """
        import abc
        def hidden(): ...
        class Plain:
            limit = 3
            def __init__(self, size): self.size = size
            def run(self, speed):
                self._ran: int = 1
        class Machine(Plain):
            @property
            def colour(self): ...
        class Foreign(abc.ABC): ...
        def start():
            global started
            started = True
    """,
    "torch/nn/__init__.py": "from ..fast import *\nfrom .functional import functional",
    "torch/nn/functional.py": "def functional(input): ...",
    "torch/fast.py": "__all__ = make()\nquick = 1\n_slow = 2",
    "torch/fast.pyi": "from typing import Any\nfrom torch.shapes import square as square\ndef stubbed(a: Any): ...",
}

HAS = """
    torch.nn torch.nn.functional torch.nn.functional.functional torch.nn.quick torch.square torch.circle torch.line
    torch.shown torch.Machine torch.Machine.run torch.Machine.limit torch.Machine.size torch.Machine._ran
    torch.Machine.colour torch.only_at_run_time torch.speed torch.counted torch.machine torch.machine.run
    torch.engine_class.run torch.opened torch.inside torch.fast.stubbed torch.fast.square torch._guts.started
    torch.fast._slow torch.shapes.left_out torch.shapes.Plain
"""
LACKS = """
    torch.only_for_types torch.left_out torch.hidden torch.Plain torch.Machine.walk torch.machine.walk torch.nn._slow
    torch.fast.Any torch.fast.slow torch.nowhere torch.nn.nowhere.at_all torch._guts.stopped
"""


def unindented(text: str) -> str:
    indent = min((len(line) - len(line.lstrip()) for line in text.splitlines() if line.strip()), default=0)
    return "\n".join(line[indent:] for line in text.splitlines())


@pytest.fixture(scope="module")
def tools():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import torch_names
        import torch_names_list
        import torch_uses

        yield SimpleNamespace(reader=torch_names, kept=torch_names_list, uses=torch_uses)


@pytest.fixture(scope="module")
def small(tools, tmp_path_factory):
    """The names of a torch of seven files, written and read back."""
    scopes = tools.reader.read_sources((path, unindented(text)) for path, text in SOURCES.items())
    tools.reader.add_native_functions(
        scopes, "- func: add.Tensor(Tensor self)\n  autogen: add.out, add_\n- func: relu(Tensor self)"
    )
    path = tmp_path_factory.mktemp("names") / "1.0.txt.gz"
    tools.kept.write_list(path, scopes, "torch 1.0")
    assert tools.kept.read_list(path) == scopes
    return tools.kept.TorchNames(tools.kept.read_list(path))


@pytest.fixture(scope="module")
def used(tools):
    """What every file of the package uses, by its path."""
    return {path: tools.uses.uses_of(path.read_text(encoding="utf-8")) for path in tools.uses.package_files()}


# -- the list ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HAS.split())
def test_a_name_that_is_there(small, name):
    assert small.look_up(name).exists


@pytest.mark.parametrize("name", LACKS.split())
def test_a_name_that_is_not_there(small, name):
    assert small.look_up(name).exists is False


@pytest.mark.parametrize("name", ["torch._guts.Foreign.register", "torch.circle.radius", "torch.ops.prims.add"])
def test_a_name_that_the_list_cannot_tell(small, name):
    assert small.look_up(name).exists is None


def test_operations_and_overloads(small):
    found = {name: small.look_up(f"torch.ops.aten.{name}").exists
             for name in ("add.Tensor", "add.out", "add_.default", "relu.default", "relu.out", "sub")}  # fmt: skip
    assert found == {"add.Tensor": True, "add.out": True, "add_.default": True, "relu.default": True,
                     "relu.out": False, "sub": False}  # fmt: skip


def test_parameters(small):
    assert small.look_up("torch.square").params == {"size", "colour", "dtype"}
    assert small.look_up("torch.Machine").params == {"size"}
    assert small.look_up("torch.Machine.run").params == {"speed"}
    assert small.look_up("torch.inside").params is None  # takes any


# -- what a file uses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("import torch\n\ntorch.nowhere()", ["3: torch.nowhere"]),
        ("import torch.nowhere", ["1: torch.nowhere"]),
        ("from torch.shapes import square, ellipse", ["1: torch.shapes.ellipse"]),
        ("import torch.shapes as s\ndef f():\n    return s.square(2, area=3)", ["3: torch.shapes.square(area=)"]),
        ("import torch\nm = torch._guts\nclass A(m.Engine): pass", ["3: torch._guts.Engine"]),
        ("import torch\ndef f(x: torch.Thing) -> torch.Other: pass", ["2: torch.Other", "2: torch.Thing"]),
        ("import torch\nreplace(torch.Machine, 'walk', 1)", ["2: torch.Machine.walk"]),
        ("import torch\nfor name in ('run', 'walk'):\n  replace(torch.Machine, name)", ["3: torch.Machine.walk"]),
        ("import torch\ngetattr(torch, 'nowhere')", ["2: torch.nowhere"]),
        ("later('torch.nowhere', 1)", ["1: torch.nowhere"]),
        ("def f(machine):\n    return machine._ran + machine._sang", ["2: _sang, an attribute of an object"]),
        ("import torch\naten = torch.ops.aten\naten.add.Scalar", ["3: torch.ops.aten.add.Scalar"]),
        ("import torch\nwith torch.nowhere(): pass", ["2: torch.nowhere"]),
        ("import torch\ntry:\n    torch.nowhere\nexcept ValueError: pass", ["3: torch.nowhere"]),
        ("import torch\ntry:\n    torch.nowhere\nexcept Exception: pass", ["3: torch.nowhere"]),
        # goes on without the name
        ("import torch\ntry:\n    torch.nowhere\nexcept (ValueError, AttributeError): pass", []),
        ("import torch, contextlib\nwith contextlib.suppress(ImportError):\n    import torch.nowhere", []),
        ("import torch\nf = getattr(torch, 'nowhere', None) or torch.square", []),
        ("import torch\nif hasattr(torch, 'nowhere'):\n    torch.nowhere()", []),
        ("import torch\nx = torch.nowhere if hasattr(torch, 'nowhere') else 1", []),
        # another object of the same name
        ("import torch\ndef f(torch):\n    return torch.nowhere", []),
        ("from torch import nn\ndef f():\n    nn = other()\n    return nn.nowhere", []),
        ("import sys\nsys._getframe()", []),
        ("class A:\n    def f(self):\n        self._own = 1\n        return self._own", []),
    ],
)
def test_missing_names_and_their_lines(tools, small, text, lacks):
    own = tools.uses.own_private_names([text])
    assert [f"{line}: {name}" for line, name in tools.uses.missing(tools.uses.uses_of(text), small, own)] == lacks


def test_most_of_what_the_package_uses_is_seen(used):
    """The collector has not gone blind: some names of each kind that the package is known to use are among the uses."""
    names = {use.name for uses in used.values() for use in uses}
    assert names >= {"torch.distributed.all_reduce", "torch.nn.Module", "torch.cuda._lazy_init", "._get_fsdp_state"}
    assert len(names) > 500


# -- the package ---------------------------------------------------------------------------------------------------


def test_the_list_is_that_of_the_lower_bound(tools):
    bound = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert bound is not None
    assert [path.name for path in tools.uses.LISTS.iterdir()] == [f"{bound[1]}.txt.gz"]


def test_every_name_is_in_the_lower_bound(tools, used):
    own = tools.uses.own_private_names([path.read_text(encoding="utf-8") for path in used])
    (path,) = tools.uses.LISTS.iterdir()
    names = tools.kept.TorchNames(tools.kept.read_list(path))
    lacks = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file, uses in used.items()
        for line, name in tools.uses.missing(uses, names, own)
    ]
    assert not lacks, f"torch {path.name.removesuffix('.txt.gz')} has no\n" + "\n".join(lacks)


def test_every_name_is_in_the_installed_version(used):
    lacks = [
        f"{file.relative_to(ROOT)}:{use.line}: {use.name}"
        for file, uses in used.items()
        for use in uses
        if not use.name.startswith(".") and not is_installed(use.name)
    ]
    assert not lacks, "the installed torch has no\n" + "\n".join(lacks)


def is_installed(name: str) -> bool:
    """Whether a chain of attributes can be followed in this process. A module at its end is not imported for that."""
    found: object = importlib.import_module("torch")
    prefix, *parts = name.split(".")
    for part in parts:
        prefix = f"{prefix}.{part}"
        may_be_module = hasattr(found, "__path__") and part not in vars(found)
        is_module = may_be_module and importlib.util.find_spec(prefix) is not None
        if is_module and prefix == name:
            return True
        if is_module:
            found = importlib.import_module(prefix)
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            return False
    return True
