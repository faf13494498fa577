"""Models on the workers: built, changed and forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from moreh_ap.protocol.messages.compile_requests import CompileRequests
from moreh_ap.protocol.messages.tensors import TensorData
from moreh_ap.protocol.tensor_source import TensorSource


@dataclass(frozen=True)
class BuildModel:
    """Unpickle a skeleton on meta, apply the plan, and fill this worker's shards from files.

    `sources` maps names of parameters and buffers to the boxes that their values lie in. `example` is the call that a
    pipeline's cut is found with; `compiled` is what the script has compiled. With `compiles_later`, blocks run as they
    are written until `UseCompiledBlocks`. Answers where the worker's parameters belong: parameters with one answer are
    laid out alike.
    """

    owner: str
    skeleton: bytes
    plan: str
    sources: dict[str, tuple[TensorSource, ...]]
    example: ExampleCall | None = None
    compiled: CompileRequests = ()
    compiles_later: bool = False


@dataclass(frozen=True)
class UseCompiledBlocks:
    """Run the blocks of a model that was built to compile them later compiled, or as written again.

    The times of steps begin anew.
    """

    owner: str
    is_on: bool


@dataclass(frozen=True)
class ExampleCall:
    """A call of a model as a script makes it; constants and nesting as in `DefineSignature`."""

    pickled_treespec: bytes
    pickled_constants: bytes
    tensors: tuple[TensorData, ...]


@dataclass(frozen=True)
class ChangeModule:
    """Set attributes of submodules: ``(module path, attribute, pickled value)``; path "" is the root."""

    owner: str
    changes: tuple[tuple[str, str, bytes], ...]


@dataclass(frozen=True)
class ReadObjects:
    """Answer attributes that forwards have set and that are not made of tensors and plain values alone: pickled objects
    by full name, without those that cannot be pickled."""

    owner: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class SetRequiresGrad:
    """Freeze or unfreeze parameters."""

    owner: str
    requires_grad: dict[str, bool]


@dataclass(frozen=True)
class SetKernelFormats:
    """Say in which memory formats the script has the kernels of convolutions."""

    owner: str
    formats: dict[str, torch.memory_format]


@dataclass(frozen=True)
class DescribeGradients:
    """Answer which parameters have a gradient, a byte each."""

    owner: str


@dataclass(frozen=True)
class RecordModules:
    """Sum up what each submodule of a model returns from now on, until `ReadModuleSums`."""

    owner: str


@dataclass(frozen=True)
class ReadModuleSums:
    """Stop, and answer a `ModuleSum` for each submodule that returned something, in the order of their first ends."""

    owner: str


class ModuleSum(NamedTuple):
    """The outputs of one submodule on one worker, all its calls together.

    Attributes:
        path: Where it is in the model.
        num_elements: Elements of its floating-point outputs.
        total: Their sum.
        squares: The sum of their squares.
    """

    path: str
    num_elements: int
    total: float
    squares: float


@dataclass(frozen=True)
class ReleaseModel:
    """Forget a model with its parameters and calls."""

    owner: str
