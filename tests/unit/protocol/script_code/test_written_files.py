"""Files that the script's code writes in a worker: noted, or dropped where a hook writes them."""

from __future__ import annotations

import functools
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch

from moreh_ap.patching import Patches
from moreh_ap.protocol.script_code import written_files
from moreh_ap.protocol.script_code.written_files import take_written, writing_nothing


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    patches = Patches()
    written_files.install(patches)
    take_written()  # of other tests
    yield
    patches.undo()
    take_written()


def write_in_many_ways(folder: Path) -> list[str]:
    with open(folder / "a.txt", "w") as file:
        file.write("a")
    (folder / "b.txt").write_text("b")
    np.save(folder / "c.npy", np.ones(2))
    torch.save(torch.ones(2), folder / "d.pt")
    with io.open(str(folder / "e.txt"), mode="x") as file:  # noqa: UP020
        file.write("e")
    return ["a.txt", "b.txt", "c.npy", "d.pt", "e.txt"]


def test_what_a_function_of_the_script_writes_is_noted_once(tmp_path: Path):
    names = write_in_many_ways(tmp_path)
    (tmp_path / "a.txt").open("a").close()
    assert [Path(file).name for file in take_written()] == names
    assert take_written() == ()


def test_reading_and_caches_are_not_noted(tmp_path: Path):
    with open(__file__) as file:
        file.readline()
    torch.save(torch.ones(1), io.BytesIO())
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"")
    with open(os.devnull, "w") as file:
        file.write("a")
    assert take_written() == ()


def called_by(call: Callable[[], IO[str]], module: str) -> Callable[[], IO[str]]:
    """Returns a function of a Python module of that name, which calls another."""
    scope: dict[str, Any] = {"__name__": module, "call": call}
    exec("def caller():\n    return call()", scope)
    return scope["caller"]


@pytest.mark.parametrize(
    ("names", "is_noted"),
    [
        (["__main__"], True),
        (["numpy.lib", "__main__"], True),
        (["torch._inductor.codecache", "torch._dynamo.eval_frame", "__main__"], False),
        (["torch._inductor", "__main__"], False),
        (["triton.backends.nvidia.compiler", "torch.nn.functional", "__main__"], False),  # a kernel of PyTorch's own
        (["tritonless", "__main__"], True),
        (
            ["transformers.utils", "moreh_ap.parallelizer.call.forward", "__main__"],
            False,
        ),  # engine by hand
        (["__main__", "moreh_ap.parallelizer.call.forward"], True),
    ],
)
def test_what_compilers_and_libraries_write_is_not_the_scripts(names: list[str], is_noted: bool):
    functools.reduce(called_by, names, functools.partial(tempfile.TemporaryFile, "w"))().close()
    assert take_written() == ((f"a temporary file in {tempfile.gettempdir()}",) if is_noted else ())


def test_what_a_hook_writes_is_dropped(tmp_path: Path):
    with writing_nothing():
        (tmp_path / "folder").mkdir()
        os.makedirs(tmp_path / "other")
        write_in_many_ways(tmp_path)
    assert list(tmp_path.iterdir()) == [] and take_written() == ()
    write_in_many_ways(tmp_path)
    with writing_nothing():
        os.remove(tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text() == "a"
