"""Hooks of the script on the gradients of parameters: `register_hook`, `register_post_accumulate_grad_hook`.

Decides when they run, and keeps them where a parameter moves between devices. Must not know where gradients are.

[Note: after the backward]
Gradients of parameters add up on the workers, and the graph of the script's process ends before them. So the earlier
gradients of parameters with hooks are set aside before a backward. Once it is through, a hook gets what this backward
gave, and what it returns is added to what was there before. Parameters that were given their hooks last come first, as
a backward reaches the last layers first. Without such hooks a backward asks whether there are any, and no more.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

_NAME = "_gradient_hooks"
Table = dict[int, Callable[[Tensor], Any]]


class GradientHooks:
    """The hooks of one parameter, which has them as an attribute.

    Args:
        parameter: The parameter.
        on_gradient: Those that may return another gradient.
        on_sum: Those that get the parameter, after its gradient was added to the earlier ones.
    """

    def __init__(self, parameter: Tensor, on_gradient: Table, on_sum: Table) -> None:
        self.parameter, self.on_gradient, self.on_sum = parameter, on_gradient, on_sum
        self._before: Tensor | None = None

    def changed(self, gradient: Tensor) -> Tensor:
        """Returns the gradient as the hooks leave it."""
        for hook in list(self.on_gradient.values()):
            result = hook(gradient)
            gradient = gradient if result is None else result
        return gradient

    def begin(self) -> None:
        """Sets the gradient aside that earlier backwards have given."""
        self._before = self.parameter.grad
        if self._before is not None:
            self.parameter.grad = None

    def end(self, is_through: bool) -> None:
        """Runs the hooks if the backward is through and has reached the parameter; adds the earlier gradient."""
        before, self._before = self._before, None
        own = self.parameter.grad
        if own is None or not is_through:
            if before is not None:
                self.parameter.grad = before
            return
        gradient = self.changed(own)
        if before is not None:
            gradient = before + gradient
        if gradient is not own:
            self.parameter.grad = gradient
        for hook in list(self.on_sum.values()):
            hook(self.parameter)


class Known:
    """The parameters of this process that have hooks.

    Attributes:
        hooks: Those of each, in the order in which parameters got the first.
        are_waiting: Whether a backward is under way, after which they run.
    """

    def __init__(self) -> None:
        self.hooks: list[weakref.ref[GradientHooks]] = []
        self.are_waiting = False

    def live(self) -> list[GradientHooks]:
        """Returns hooks that are not removed, of parameters that still exist."""
        self.hooks = [one for one in self.hooks if one() is not None]
        found = [one() for one in self.hooks]
        return [one for one in found if one is not None and (one.on_gradient or one.on_sum)]


KNOWN = Known()


def add(parameter: Tensor, hook: Callable[[Tensor], Any], *, on_sum: bool = False) -> RemovableHandle:
    """Adds a hook to a parameter on the accelerator.

    Raises:
        RuntimeError: The parameter is frozen; the text is PyTorch's.
    """
    if not parameter.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    hooks = vars(parameter).get(_NAME)
    if hooks is None:
        hooks = GradientHooks(parameter, OrderedDict(), OrderedDict())
        _give(parameter, hooks)
    table = hooks.on_sum if on_sum else hooks.on_gradient
    handle = RemovableHandle(table)
    table[handle.id] = hook
    return handle


def _give(parameter: Tensor, hooks: GradientHooks) -> None:
    vars(parameter)[_NAME] = hooks
    if all(one() is not hooks for one in KNOWN.hooks):  # a parameter that changes its dtype keeps the object
        KNOWN.hooks.append(weakref.ref(hooks))


def take(parameter: Tensor, *, is_virtual: bool) -> GradientHooks | None:
    """Returns the hooks of a parameter that is about to move, and takes them from it; None if it has none."""
    hooks: GradientHooks | None = vars(parameter).pop(_NAME, None)
    if hooks is not None or is_virtual:
        return hooks
    on_gradient, on_sum = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if not on_gradient and not on_sum:
        return None
    return GradientHooks(parameter, on_gradient or OrderedDict(), on_sum or OrderedDict())


def give_back(parameter: Tensor, hooks: GradientHooks | None, *, is_virtual: bool) -> None:
    """Gives a parameter that has moved its hooks; their handles still remove them."""
    if hooks is None:
        return
    if is_virtual:
        hooks.parameter = parameter
        _give(parameter, hooks)
        return
    if hooks.on_gradient:
        parameter._backward_hooks = hooks.on_gradient
    if hooks.on_sum:
        parameter._post_accumulate_grad_hooks = hooks.on_sum  # type: ignore[attr-defined]


def changed(tensor: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Returns what `torch.autograd.grad` gives for a tensor, as hooks on a parameter leave it."""
    hooks = vars(tensor).get(_NAME)
    return gradient if hooks is None or gradient is None else hooks.changed(gradient)


@contextmanager
def after_backward() -> Iterator[None]:
    """Around a backward: runs the hooks after it. See [Note: after the backward]."""
    hooks, is_through = KNOWN.live(), False
    KNOWN.are_waiting = True
    try:
        for one in hooks:
            one.begin()
        yield
        is_through = True
    finally:
        KNOWN.are_waiting = False
        for one in reversed(hooks):
            one.end(is_through)
