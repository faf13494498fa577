"""What a block may not do if its graph is to run without the surroundings of a forward.

Decides by the operations of a graph. Must not know how graphs come about or what becomes of them.

[Note: compiled code has no surroundings]
A forward runs under torch function modes: means over the batch are shares of the global mean (`loss_reduction.py`),
rows keep their random numbers (`shared_draws.py`), CUDA devices mean this worker's (`placement.py`). Compiled code is
called without them, and has to compute the same. So a graph is looked at before it is compiled. Since it is the whole
of a block's forward, nothing happens in the block that was not looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moreh_ap.parallelizer.loss.loss_precision import RAISED
from moreh_ap.parallelizer.loss.mean_functions import LOSSES
from moreh_ap.parallelizer.rng.shared_draws import MAY_DRAW
from moreh_ap.parallelizer.surroundings.placement import CUDA_DEVICES

_LOSSES = frozenset(loss.__name__ for loss in LOSSES)
_RAISED = frozenset(function.__name__ for function in RAISED)
_IN_PLACE = frozenset({"iadd", "isub", "imul", "itruediv", "ifloordiv", "imatmul", "ipow", "setitem"})
_DROPOUTS = frozenset(name for name in MAY_DRAW if "dropout" in name)


def rows_meet(graph: GraphModule) -> str:
    """Returns what a block takes over the rows of a batch, as the end of a sentence; "" if nothing."""
    for node in _operations(graph):
        name = _name_of(node)
        if name in _LOSSES or name.endswith("_loss"):
            return f"it takes a loss over the rows of the batch ({name})"
        if name == "mean" and _is_over_rows(node):
            return "it takes a mean over the rows of the batch"
        if name in ("sum", "count_nonzero") and _counts_all(node):
            return f"it counts the true elements of a mask ({name})"
    return ""


def is_raised(graph: GraphModule) -> str:
    """Returns what a block computes in float32 under a plan in bfloat16, as the end of a sentence; "" if nothing."""
    for node in _operations(graph):
        if _name_of(node) in _RAISED:
            return f"it takes a loss ({_name_of(node)}), which is float32 only uncompiled"
    return ""


def draws(graph: GraphModule) -> str:
    """Returns what a block draws random numbers with, as the end of a sentence; "" if nothing."""
    for node in _operations(graph):
        name = _name_of(node)
        if name in MAY_DRAW and _probability(node, name) != 0.0:
            return f"it draws random numbers ({name}), which are those of one device only uncompiled"
    return ""


def names_cuda(graph: GraphModule) -> str:
    """Returns that a block names a CUDA device, as the end of a sentence; "" if it does not."""
    for node in _operations(graph):
        given = (*node.args, *node.kwargs.values())
        if _name_of(node) == "cuda" or any(isinstance(v, (str, torch.device)) and v in CUDA_DEVICES for v in given):
            return "it names a CUDA device, which means this worker's only uncompiled"
    return ""


def changes_in_place(graph: GraphModule) -> str:
    """Returns that a block changes a tensor in place, as the end of a sentence; "" if it does not."""
    for node in _operations(graph):
        name = _name_of(node)
        if node.kwargs.get("inplace") or (name.endswith("_") and not name.startswith("_")) or name in _IN_PLACE:
            return f"it changes a tensor in place ({name}), whose results recompute=selective cannot keep"
    return ""


def _operations(graph: GraphModule) -> list[Node]:
    graphs = [module.graph for module in graph.modules() if isinstance(module, GraphModule)]
    return [node for one in graphs for node in one.nodes if node.op in ("call_function", "call_method")]


def _name_of(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _value_of(node: object) -> object:
    return node.meta.get("example_value") if isinstance(node, Node) else node


def _is_over_rows(node: Node) -> bool:
    value = _value_of(node.args[0] if node.args else node.kwargs.get("input"))
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis"))
    if not isinstance(value, Tensor):
        return True
    dims = (dim,) if isinstance(dim, int) else tuple(dim or range(value.ndim))  # type: ignore[arg-type]
    return 0 in [d % value.ndim for d in dims if isinstance(d, int)] if value.ndim else False


def _counts_all(node: Node) -> bool:
    value = _value_of(node.args[0] if node.args else node.kwargs.get("input"))
    has_dims = len(node.args) > 1 or bool({"dim", "axis", "keepdim"} & node.kwargs.keys())
    return isinstance(value, Tensor) and value.dtype is torch.bool and value.ndim > 0 and not has_dims


def _probability(node: Node, name: str) -> float | None:
    """Returns the probability with which something drops, None where that is not known."""
    if name == "scaled_dot_product_attention":
        found = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    elif name in _DROPOUTS:
        given = dict(zip(("input", "p", "training"), node.args)) | node.kwargs
        found = 0.0 if given.get("training", given.get("train")) is False else given.get("p")
    else:
        return None
    return float(found) if isinstance(found, (int, float)) else None
