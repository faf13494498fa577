"""Finds the denominators of a forward's mean losses without computing the forward.

Decides which of its tensors are real and which are on meta. Must not know what the denominators are for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from moreh_ap.errors import ExactnessError
from moreh_ap.parallelizer.loss.input_operations import InputOperationRecorder
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.loss.mean_functions import COUNTS, LOSSES, MEANS
from moreh_ap.parallelizer.loss.mean_rules import NO_RULES, MeanRules

_GROUPED_PRODUCTS = {getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)} - {None}
"""Products of a mixture of experts. On meta PyTorch takes nothing but bfloat16, on devices every dtype."""


class MetaReduction(GlobalReduction):
    """Records the denominators of a forward whose parameters are on meta, from inputs that are real.

    Whatever depends on a parameter is on meta, where mathematics costs nothing; what depends on the inputs alone
    (labels, masks) is real, so the numbers of valid targets are. An operation on both gives a result on meta.

    Args:
        device: This worker's device.
        rules: Which numbers are means over the batch.
        recorder: Notes the operations on the inputs; None: they are not computed again.
    """

    def __init__(
        self, device: torch.device, *, rules: MeanRules = NO_RULES, recorder: InputOperationRecorder | None = None
    ) -> None:
        super().__init__(device, record=True, rules=rules)
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._recorder is None:
            return self.compute(func, args, kwargs or {})
        return self._recorder.observe(func, args, kwargs or {}, self.compute, self.local_denominators)

    def compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a torch function as the forward gets it."""
        if func in LOSSES or func in MEANS or func in COUNTS:
            return super().__torch_function__(func, (), args, kwargs)
        tensors: list[Tensor] = []
        tree_map_only(Tensor, tensors.append, (args, kwargs))
        if any(t.is_meta for t in tensors) and not all(t.is_meta for t in tensors):
            args, kwargs = tree_map_only(Tensor, _to_meta, (args, kwargs))
        if func in _GROUPED_PRODUCTS and len(args) > 1 and args[0].is_meta and (args[0].ndim, args[1].ndim) == (2, 3):
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1], dtype=kwargs.get("out_dtype"))
        if func is Tensor.cuda or func is Tensor.to or "device" in kwargs:
            func, args, kwargs = self.place(func, args, kwargs)
        return func(*args, **kwargs)

    def place(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """As for any worker, with two exceptions.

        A move leaves real what is real and on meta what is on meta. What is made on the device of a tensor that happens
        to be on meta (positions, masks) is made real: control flow may ask for its values.
        """
        func, args, kwargs = super().place(func, args, kwargs)
        if func is not Tensor.to and _names_meta(kwargs.get("device")):
            kwargs = {**kwargs, "device": self.device}
        if func is Tensor.to:
            here = args[0].device
            args = tuple(here if isinstance(arg, (torch.device, str)) else arg for arg in args)
            kwargs = {**kwargs, "device": here} if "device" in kwargs else kwargs
        return func, args, kwargs

    def _evaluate(self, func: Callable[..., Any], call: inspect.BoundArguments) -> Tensor:
        if func is F.ctc_loss:  # which reads lengths; (T, B, V) or (T, V)
            scores = call.arguments["log_probs"]
            return scores.new_empty(scores.shape[1:-1], device="meta")
        args, kwargs = tree_map_only(Tensor, _to_meta, (call.args, call.kwargs))
        return func(*args, **kwargs)

    def _share(self, total: Tensor, count: Tensor | int) -> Tensor:
        self._add_up(count)
        return total

    def _add_up(self, count: Tensor | int) -> Tensor:
        if isinstance(count, Tensor) and count.is_meta:
            raise ExactnessError("the denominator of a mean loss depends on parameters", "labels among the inputs")
        return super()._add_up(count)


def _names_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")
