"""Forwards that run in the script: those that train, draw for Pyro, draw in a backward, mark parameters, or
differentiate what they are given.

A forward that trains computes gradients and steps an optimizer itself, as the meta-learner of MAML does. One that draws
for Pyro speaks to handlers (a trace, a replay) that the script has entered, and no worker has. One that goes through a
`torch.autograd.Function` whose backward draws random numbers (Shake-Shake, ShakeDrop) moves the script's stream between
the script's own draws. One that sets an attribute on a parameter (``self.weight.org = ...``, binary networks) shares it
with the script, which has parameters of its own. One that differentiates an argument by another (the path length
penalty of StyleGAN2 as a module with averages of its own) goes through a graph that the script has. Decides which
modules have one; the other modules that it calls run on the workers. Must not know what is done with a module.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.protocol.script_code.script_globals import functions_of
from moreh_ap.session.state_tensors import ModelState, OnWorkers

_CALLS = {"backward", "step"}
_DRAWS = {"pyro", "sample"}
_RANDOM = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "random", "random_"),
    *("bernoulli", "bernoulli_", "uniform", "uniform_", "normal", "normal_", "exponential_", "geometric_", "cauchy_"),
    *("log_normal_", "multinomial", "poisson", "dropout"),
}
"""Names of what draws, in PyTorch, NumPy and Python's `random`."""


def runs_in_script(module: nn.Module) -> bool:
    """Says whether a module's forward trains, or what it calls draws in a backward or marks parameters."""
    return trains_itself(module) or draws_in_backward(module) or marks_parameters(module)


def trains_itself(module: nn.Module) -> bool:
    """Says whether the code of a module's forward has both ``loss.backward()`` and ``optimizer.step()``."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code is not None and _CALLS.issubset(code.co_names)


def draws_for_pyro(module: nn.Module) -> bool:
    """Says whether a module is one of Pyro's classes (a model, an automatic guide), or its forward has
    ``pyro.sample(...)``."""
    if any(base.__module__ == "pyro.nn.module" for base in type(module).__mro__):
        return True
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code is not None and _DRAWS.issubset(code.co_names)


def draws_in_backward(module: nn.Module) -> bool:
    """Says whether calls of a module may come to a `torch.autograd.Function` of the script whose backward draws."""
    backwards = (function for function in functions_of(module) if function.__name__ == "backward")
    return any(not _RANDOM.isdisjoint(function.__code__.co_names) for function in backwards)


def marks_parameters(module: nn.Module) -> bool:
    """Says whether calls of a module may come to code of the script that sets a new attribute of a parameter."""
    names = {name.rpartition(".")[2] for name, _ in module.named_parameters()}
    for function in functions_of(module):
        for before, after in itertools.pairwise(dis.get_instructions(function.__code__)):
            is_set = after.opname == "STORE_ATTR" and not hasattr(Tensor, after.argval)
            if is_set and before.opname == "LOAD_ATTR" and before.argval in names:
                return True
    return False


def may_differentiate_arguments(module: nn.Module) -> bool:
    """Says whether the code of a module's forward, or what it names, calls `torch.autograd.grad`."""
    functions = functions_of(module, with_submodules=False)
    return any("grad" in function.__code__.co_names for function in functions)


def follow_from_each_other(arguments: Any) -> bool:
    """Says whether one of the tensors among the arguments of a call was computed from another one.

    What calls on the workers have computed follows from all parameters of their model.
    """
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.requires_grad]
    nodes = {tensor.grad_fn for tensor in tensors}
    leaves = {id(_leaf_of(tensor)) for tensor in tensors if tensor.grad_fn is None}
    waiting, seen = [node for node in nodes if node is not None], set()
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if (node in nodes and node is not None) or id(getattr(node, "variable", None)) in leaves:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return False


def _leaf_of(tensor: Tensor) -> Tensor:
    """Returns what stands for a tensor without a `grad_fn` in graphs: for parameters on the workers, the anchor."""
    value = tensor._cell.value if isinstance(tensor, VirtualTensor) else None
    if isinstance(value, OnWorkers) and isinstance(value.owner, ModelState):
        return value.owner.live_model().anchor
    return tensor
