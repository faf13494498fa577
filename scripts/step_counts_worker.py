"""What a worker counts of a step: Python calls of the package, values of tensors that it reads, calls of modules.

Decides what a host synchronization is: a function of PyTorch that gives Python, or host memory, the value of a tensor.
On a GPU it waits until everything before is computed. What models and optimizers read themselves is not counted, nor is
`numpy`, which takes tensors of host memory only.

A worker runs a function of this module while it unpacks a command: `OnWorker(function, arguments)` unpickles as
``()``, after the call, in the thread that executes commands.
"""

from __future__ import annotations

import collections
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from call_counter import CallCounter
from torch import nn
from torch.overrides import TorchFunctionMode

from moreh_ap.protocol.script_code.written_files import take_written

READS = {
    "item", "tolist", "cpu", "nonzero", "equal", "is_nonzero",
    "__bool__", "__int__", "__float__", "__index__", "__complex__",
}  # fmt: skip


class OnWorker:
    """Calls a function of this module where it is unpickled.

    Args:
        function: The function.
        arguments: What it is called with.
    """

    def __init__(self, function: Callable[..., None], *arguments: str) -> None:
        self._called = function, arguments

    def __reduce__(self) -> tuple[Callable[..., tuple[()]], tuple[Any, ...]]:
        return _call, self._called


def _call(function: Callable[..., None], arguments: tuple[str, ...]) -> tuple[()]:
    function(*arguments)
    return ()


class ReadCounter(TorchFunctionMode):
    """Counts what the package reads of tensors, by the function that reads.

    Attributes:
        reads: How often, by module and function of the package, and the function of PyTorch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: collections.Counter[str] = collections.Counter()

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in READS:
            reader = _reader(sys._getframe(1))
            if reader.startswith("moreh_ap."):
                self.reads[f"{reader} {name}"] += 1
        return function(*args, **(kwargs or {}))


def _reader(frame: FrameType | None) -> str:
    """Returns the innermost function on the stack that is none of PyTorch's; optimizers read for themselves."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        is_passing_on = frame.f_code.co_name == "__torch_function__"  # what the model reads, through a mode of ours
        if not is_passing_on and (not module.startswith("torch.") or module.startswith("torch.optim.")):
            return f"{module} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return ""


class ModuleCounter:
    """Counts the calls of modules.

    Attributes:
        called: How often, by class.
    """

    def __init__(self) -> None:
        self.called: collections.Counter[str] = collections.Counter()
        self._patch: Any = None

    def begin(self) -> None:
        """Counts from now on."""
        self.called.clear()
        call = nn.Module._call_impl

        def counting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.called[type(module).__name__] += 1
            return call(module, *args, **kwargs)

        self._patch = patch.object(nn.Module, "_call_impl", counting)
        self._patch.start()

    def end(self) -> None:
        """Counts no longer."""
        self._patch.stop()


_calls, _reads, _modules = CallCounter(), ReadCounter(), ModuleCounter()


def begin_calls() -> None:
    """Counts calls from now on; no finalizer of earlier steps runs meanwhile."""
    gc.collect()
    gc.disable()
    _calls.begin()


def end_calls(folder: str) -> None:
    """Counts no longer, and leaves the calls in `folder`."""
    calls = _calls.end()
    gc.enable()
    _leave(folder, {" ".join(function): number for function, number in calls.items()})


def begin_reads() -> None:
    """Counts reads from now on."""
    _reads.reads.clear()
    _reads.__enter__()


def end_reads(folder: str) -> None:
    """Counts no longer, and leaves the reads in `folder`."""
    _reads.__exit__(None, None, None)
    _leave(folder, _reads.reads)


def begin_modules() -> None:
    """Counts calls of modules from now on."""
    _modules.begin()


def end_modules(folder: str) -> None:
    """Counts no longer, and leaves the calls in `folder`."""
    _modules.end()
    _leave(folder, _modules.called)


def _leave(folder: str, counts: dict[str, int]) -> None:
    (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(counts))
    take_written()  # no forward has written it
