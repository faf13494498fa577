"""What forwards and hooks do in workers beside computing: files, and numbers that change in a backward."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from moreh_ap.session.session import Session


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


class Saving(Net):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def forward(self, x):
        with self.file.open("a") as file:
            file.write("a row\n")
        return super().forward(x)


class CallsAgain(torch.autograd.Function):
    """As the adjoint method does: the forward of a part runs once more in the backward."""

    @staticmethod
    def forward(ctx, x, part):
        ctx.part = part
        return part(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            return grad + 0 * ctx.part(grad), None


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nfe = 0

    def forward(self, x):
        self.nfe += 1
        return x * 2


class Adjoint(Net):
    def __init__(self) -> None:
        super().__init__()
        self.part = Counting()

    def forward(self, x):
        return CallsAgain.apply(self.layer(x), self.part)


LATE = """
from torch import nn

class Late(nn.Linear):
    def forward(self, x, scale):
        from module_of_late import twice
        return twice(super().forward(x)) * scale.factor
"""
OF_LATE = """
class Scale:
    factor = 0.5

def twice(x):
    return x * 2
"""


def test_a_model_of_a_folder_that_the_script_imports_from_since_the_line(
    accelerator: Callable[[str], Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    accelerator("replicate=2")
    Net().cuda()(torch.ones(2, 4).cuda())
    (tmp_path / "late_model.py").write_text(LATE)
    (tmp_path / "module_of_late.py").write_text(OF_LATE)
    monkeypatch.syspath_prepend(tmp_path)
    late, of_late = (importlib.import_module(name) for name in ("late_model", "module_of_late"))
    model, x = late.Late(4, 3), torch.rand(6, 4)
    expected = model(x, of_late.Scale())
    assert torch.allclose(model.cuda()(x.cuda(), of_late.Scale()).cpu(), expected)


class ReadsArguments(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if "--double" in sys.argv else 1)


def test_a_forward_that_reads_the_arguments_of_the_script(
    accelerator: Callable[[str], Session], monkeypatch: pytest.MonkeyPatch
):
    accelerator("replicate=2")
    monkeypatch.setattr(sys, "argv", ["train.py", "--double"])
    model, x = ReadsArguments(4, 3), torch.rand(6, 4)
    expected = model(x)
    assert torch.allclose(model.cuda()(x.cuda()).cpu(), expected)


def test_a_hook_writes_its_file_once_and_of_the_whole_batch(accelerator: Callable[[str], Session], tmp_path: Path):
    accelerator("replicate=2")
    model = Net().cuda()

    def log(module, args, output):
        (tmp_path / "folder").mkdir(exist_ok=True)
        with open(tmp_path / "folder" / "log.txt", "a") as file:
            file.write(f"{len(output)}\n")
        torch.save(output.shape, tmp_path / f"{len(output)}.pt")

    model.layer.register_forward_hook(log)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(3):
            model(torch.ones(8, 4).cuda()).sum().backward()
    assert (tmp_path / "folder" / "log.txt").read_text() == "8\n" * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["8.pt", "folder"]


def test_the_script_is_warned_once_of_a_file_that_a_forward_writes(
    accelerator: Callable[[str], Session], tmp_path: Path
):
    accelerator("shard=2")  # by FSDP2, which gives the model another class
    model = Saving(tmp_path / "rows.txt").cuda()
    with pytest.warns(UserWarning, match=r"forward\(\) of Saving writes .*rows.txt in every worker"):
        model(torch.ones(8, 4).cuda())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(torch.ones(8, 4).cuda()).sum().item()
        model(torch.ones(8, 4).cuda()).sum().item()


def test_the_script_is_warned_once_of_a_counter_that_changes_in_a_backward(accelerator: Callable[[str], Session]):
    accelerator("replicate=2")
    model = Adjoint().cuda()
    found = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model(torch.ones(8, 4).cuda()).sum().backward()
        found.append([str(one.message) for one in seen if "in a backward" in str(one.message)])
    assert found[0] == found[2] == []
    assert "forward() of Adjoint changes part.nfe when it runs in a backward" in found[1][0]
