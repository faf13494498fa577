"""PyTorch's compiler as this package uses it: settings, back ends, errors, and what a machine lacks for them.

Decides how a script's options reach a back end. Must not know blocks. PyTorch imports the compiler when something of it
is looked at first, which takes a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from moreh_ap.local import cpp_compiler
from moreh_ap.protocol.messages.compile_requests import CompileRequest

_CUDA_GRAPHS = "triton.cudagraphs"
_MAX_REASON = 300


def prepare(device: torch.device, num_graphs: int) -> None:
    """Sets the compiler up in this process.

    Args:
        device: This worker's device.
        num_graphs: How many graphs a forward may have.
    """
    if device.type == "cpu":  # workers share the cores, and are to leave no processes behind; read at the first import
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    dynamo, functorch = torch._dynamo.config, torch._functorch.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, num_graphs)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, num_graphs)
    dynamo.skip_nnmodule_hook_guards = False  # hooks may come to modules inside a block, and have to run
    functorch.donated_buffer = False  # a backward may be followed by another one


def why_not(request: CompileRequest, device: torch.device) -> str:
    """Returns why nothing can be compiled here with such options, as the end of a sentence; "" if it can."""
    if not request.backend:
        return "its backend is a function of the script, which workers do not have; name a backend instead"
    if request.backend == "cudagraphs":
        return "backend='cudagraphs' records memory that a plan moves; use 'inductor' or 'aot_eager'"
    if request.backend == "inductor" and device.type == "cpu":
        compiler = cpp_compiler.missing()
        if compiler:
            return f"there is no C++ compiler: {compiler} is not on the PATH; install it, or set CXX"
    return ""


def compile_graph(graph: GraphModule, inputs: list[Any], request: CompileRequest) -> Callable[..., Any]:
    """Returns what runs a graph.

    Args:
        graph: The graph.
        inputs: Tensors like those that it will be run with.
        request: The back end and its options. CUDA graphs are left out: they need parameters that stay where they are.
    """
    if request.backend != "inductor":
        compiler: Callable[..., Any] = torch._dynamo.lookup_backend(request.backend)
        return compiler(graph, inputs, **({"options": request.options} if request.options else {}))
    inductor = torch._TorchCompileInductorWrapper(request.mode, request.options, request.dynamic)
    inductor.config.pop(_CUDA_GRAPHS, None)
    compiled: Callable[..., Any] = inductor(graph, inputs)
    return compiled


def cause_of(error: Exception) -> BaseException:
    """Returns the error of a back end, or the error itself."""
    return getattr(error, "inner_exception", None) or error


def reason_of(error: Exception) -> str:
    """Returns why something could not be compiled, in one line."""
    cause = cause_of(error)
    text = str(cause).strip() or type(cause).__name__
    first = " ".join(line.strip() for line in text.splitlines()[:3] if line.strip())
    return first if len(first) <= _MAX_REASON else first[:_MAX_REASON] + "..."
