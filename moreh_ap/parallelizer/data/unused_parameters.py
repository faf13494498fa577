"""Gradients that only some workers have, of parameters that FSDP2 manages.

FSDP2 reduces the gradients that a worker has, and takes for granted that all workers have those of the same parameters.
A parameter may be used on one worker and not on another: an expert that no token of its rows goes to. Decides what
takes the place of a gradient that is missing on this worker, and whether it stays. Must not know plans, batches or
losses.

[Note: missing here]
Before FSDP2 reduces, zeros become the gradient of every parameter that has none. After backward the workers tell each
other which they had; a parameter that nobody used gets back what it had before, which may be None. Only a worker that
misses a gradient looks at the answer, so the usual step reads nothing back from the device. It is what
`bucketed_allreduce.py` does for whole parameters.

A step may reduce once for each micro-batch: a gradient is missing if it was in all of them. Sums over the replicas of a
shard wait for the last one ([Note: every micro-batch] in `fsdp.py`). A block that only earlier micro-batches came to is
reduced once more behind it, with zeros, which takes what waits to the replicas.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from moreh_ap.parallelizer.call.call import attach_gradient_sync
from moreh_ap.parallelizer.data.fsdp import fsdp_modules, param_groups
from moreh_ap.patching import Patches

_CHANGED: weakref.WeakSet[Any] = weakref.WeakSet()


def install(patches: Patches) -> None:
    """Note what `attach` replaces from now on, and have it taken back by the undoing."""
    patches.group("FSDP2 takes for granted that all workers have the gradients of the same parameters.").note(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward",
        "Of each group of a model's parameters: fills in missing gradients with zeros first, and waits for the "
        "end of the backward where a layer was read outside of its call.",
        _restore_all,
    )


def _restore_all() -> None:
    while _CHANGED:
        del _CHANGED.pop().post_backward


class UnevenGradients:
    """Lets FSDP2 reduce gradients that only some workers have. See [Note: missing here].

    Args:
        module: The module, wrapped already.
        group: The process group of the workers that share the batch.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._filled: dict[Any, int] = {}  # parameter -> reductions for which it had no gradient
        self._reductions: dict[Any, int] = {}  # group of parameters -> reductions
        self._some_wait = False  # sums over replicas, for the last micro-batch
        groups = [group for submodule in fsdp_modules(module) for group in param_groups(submodule)]
        self._params = [param for group in groups for param in group.fsdp_params]
        self._number = {param: number for number, param in enumerate(self._params)}
        self._groups = groups
        for param_group in groups:
            self._fill_before_reducing(param_group)

    def _fill_before_reducing(self, param_group: Any) -> None:
        reduce = param_group.post_backward

        def post_backward(*unused: Any) -> None:
            if param_group.reduce_grads and param_group.is_unsharded:
                self._reductions[param_group] = self._reductions.get(param_group, 0) + 1
                self._some_wait |= not param_group.all_reduce_grads
                self._fill(param_group.fsdp_params)
            reduce(*unused)

        param_group.post_backward = post_backward
        _CHANGED.add(param_group)

    def _fill(self, params: list[Any]) -> None:
        for param in params:
            full = param.unsharded_param
            if full.requires_grad and full.grad is None and param.unsharded_accumulated_grad is None:
                full.grad = torch.zeros_like(full)
                self._filled[param] = self._filled.get(param, 0) + 1

    def _missing(self) -> list[Any]:
        """Returns the parameters that had no gradient here at any of their reductions."""
        group_of = {param: group for group in self._groups for param in group.fsdp_params}  # blocks join other groups
        return [param for param, times in self._filled.items() if times == self._reductions[group_of[param]]]

    def _finish_sums(self) -> None:
        """Sums over replicas what the last micro-batch did not come to: on every worker the same blocks."""
        for param_group in self._groups:
            if param_group._partial_reduce_output is not None:
                param_group.unshard()
                param_group.wait_for_unshard()
                param_group.post_backward()
                param_group.finalize_backward()
                param_group._training_state = TrainingState.IDLE

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Around everything that adds to gradients until they are reduced: parameters that no worker used keep theirs.

        A collective, unless the block raises.
        """
        if not self._params:
            yield
            return
        without = [param.sharded_param.grad is None for param in self._params]
        self._filled.clear()
        self._reductions.clear()
        self._some_wait = False
        yield
        if self._some_wait:
            self._finish_sums()
        used = torch.ones(len(self._params), dtype=torch.int32, device=self._params[0].device)
        missing = self._missing() if self._filled else []
        if missing:
            used[[self._number[param] for param in missing]] = 0
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        if missing:
            for param, is_used, had_none in zip(self._params, used.tolist(), without, strict=True):
                if had_none and not is_used:
                    param.sharded_param.grad = None


def attach(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Makes gradients of `module` even over `group` before FSDP2 reduces them."""
    attach_gradient_sync(module, UnevenGradients(module, group))
