"""Attributes that forwards set and later forwards read: how a forward is given them, and how reading is noticed.

Decides both for one forward in a worker. Must not know who keeps the values. See `passed_state.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.extension import CallExtension, Findings, Forward
from moreh_ap.parallelizer.call.forward import EagerForward
from moreh_ap.parallelizer.call.parameter_writes import WrittenParameters
from moreh_ap.parallelizer.data.opened_blocks import joining_opened
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.loss.mean_rules import NO_RULES
from moreh_ap.parallelizer.trial.dry_run import NoDropout, attempt, untouched
from moreh_ap.parallelizer.trial.row_comparison import choose_rows
from moreh_ap.protocol.batch import select_rows
from moreh_ap.protocol.module_attributes import namespace_of
from moreh_ap.protocol.passed_state import PASSED_STATE


def split_passed_state(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of the forward itself, and the attributes passed with them."""
    return {name: value for name, value in kwargs.items() if name != PASSED_STATE}, kwargs.get(PASSED_STATE, {})


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Sets an attribute of a part of the module, such as ``encoder.hidden``."""
    attributes, last = _place_of(module, name)
    attributes[last] = value


def _place_of(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, last = name.rpartition(".")
    return namespace_of(module.get_submodule(path), last), last


def _written(module: nn.Module, name: str, value: Any) -> Any:
    """Returns what a forward gets of a value: of a buffer with a graph a copy, since nothing is written into leaves."""
    is_buffer = name.rpartition(".")[2] in module.get_submodule(name.rpartition(".")[0])._buffers
    return value.clone() if is_buffer and isinstance(value, Tensor) and value.requires_grad else value


def with_tensors(module: nn.Module, names: Collection[str]) -> set[str]:
    """Returns those of some attributes of the module that hold tensors; no others are passed."""
    places = {name: _place_of(module, name) for name in names}
    kept = {name: attributes.get(last) for name, (attributes, last) in places.items()}
    return {name for name, value in kept.items() if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))}


class PassedState(CallExtension):
    """Sets the attributes that are passed with a call before its forward runs."""

    def around_forward(self, findings: Findings, module: nn.Module, forward: Forward) -> Forward:
        """Returns a forward that takes the attributes under one more keyword."""

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            kwargs, kept = split_passed_state(kwargs)
            for name, value in kept.items():
                set_attribute(module, name, value)
            return forward(args, kwargs)

        return run

    def prepared(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Returns arguments in which buffers with a graph are copies."""
        _, kept = split_passed_state(kwargs)
        if not kept:
            return args, kwargs
        return args, {**kwargs, PASSED_STATE: {name: _written(module, name, value) for name, value in kept.items()}}


class Reads:
    """Inside, it is noticed whether a forward reads attributes; they are cut off from what computed them.

    The attributes are not put back.

    Args:
        module: The model.
        names: Its attributes to watch.

    Attributes:
        found: Those that were read.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self._module, self._names = module, names
        self.found: set[str] = set()

    def __enter__(self) -> Reads:
        for name in self._names:
            attributes, last = _place_of(self._module, name)
            if last in attributes:
                held, watched = attributes[last], tree_map_only(Tensor, self._watcher(name), attributes[last])
                if type(held) is list:  # other parts may have the same list, and fill it
                    held[:] = watched
                else:
                    attributes[last] = watched
        return self

    def __exit__(self, *exc: object) -> None:
        for name in self._names:
            attributes, last = _place_of(self._module, name)
            for leaf in tree_leaves(attributes.get(last)):
                if isinstance(leaf, _Watched):
                    leaf.on_read = None

    def _watcher(self, name: str) -> Callable[[Tensor], _Watched]:
        def watched(value: Tensor) -> _Watched:
            with torch._C.DisableTorchFunctionSubclass():  # nothing is read of one that is watched under another name
                made = value.detach().as_subclass(_Watched)
            made.on_read = lambda: self.found.add(name)
            return made

        return watched


class _Watched(Tensor):
    """A tensor that says when something is computed from it; what is, is an ordinary tensor."""

    on_read: Callable[[], object] | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, _Watched) and leaf.on_read is not None:
                leaf.on_read()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@joining_opened
def find_passed_state(
    call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int | None, names: Collection[str]
) -> set[str]:
    """Returns which attributes the forward of `call` reads before it sets them itself, of those called `names`.

    A forward of a few rows that ends early, as where an attribute has the rows of the whole batch, is run with all of
    them; what it has come to counts. It leaves nothing. A collective, as `check_split`.
    """
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    tried = [leaves]
    if rows is not None and rows > 1:
        tried.insert(0, select_rows(leaves, rows, choose_rows(leaves, rows)))
    call = replace(call, mode="unsplit", random=call.random.for_probe(), kinds=None, rules=NO_RULES, grad=False)
    reads = Reads(call.module, names)

    def run(leaves: list[Any]) -> None:
        args, kwargs = tree_unflatten(leaves, spec)
        with reads, NoDropout(), WrittenParameters(call.module):
            EagerForward(call, args, kwargs, reduction=GlobalReduction(call.device, record=True))

    for some in tried:
        with untouched(call.module):
            failed = attempt(partial(run, some), call.module)
        if not failed:
            break
    return reads.found
