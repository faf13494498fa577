"""Sums the gradients of whole (unsharded) parameters over the workers, while backward still runs.

Decides when a gradient is ready to be summed, in which bucket it travels, and how a sum is added to gradients of
earlier backward calls. Must not know plans, batches or losses: each worker's gradient is already its share of the
global one, so nothing is divided here. In how many exchanges a sum travels between hosts is `group_sums.py`'s matter.

[Note: one backward call]
Gradients left by earlier backward calls are sums over the workers already and must not be summed again, so `sync`
puts them aside, lets backward write fresh ones, sums those, and adds them to what was put aside. A bucket starts its
all-reduce as soon as its last gradient is written; buckets start in the same order on every worker.

[Note: unused parameters]
A parameter may be used on one worker and not on another (its slice of the batch took another branch). Every bucket
carries one extra number a parameter, 1 where the worker has a gradient. After the sum a parameter keeps `grad is
None` only if no worker had one. Only a worker that misses a gradient looks at the numbers, so the usual step reads
nothing back from the device.

[Note: a buffer a backward]
`.grad` is a view of its bucket's buffer, which saves a copy. Each backward call gets new buffers, so a gradient that a
hook or the controller kept stays what it was; a bucket forgets its buffer once the sums are handed out, so that it is
freed with the gradients. CUDA's caching allocator gives the same memory again. On a CPU, filling a new buffer of 25 MiB
took 3.7 to 6.7 ms, filling a used one 4.3 to 4.5 ms.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from moreh_ap.parallelizer.call.call import attach_gradient_sync
from moreh_ap.parallelizer.group_sums import HostSums, Sum

BUCKET_BYTES = 25 * 2**20
"""Size of a bucket. Source: default `bucket_cap_mb` of torch.nn.parallel.DistributedDataParallel."""

_ATTRIBUTE = "_moreh_gradient_sync"


class GradientSync:
    """Sums gradients of the plain parameters of a module over a process group.

    Args:
        module: The module; its DTensor parameters are left to whoever sharded them.
        group: The process group to sum over; None is the default group.
        hosts: What sums over the group host by host; None: one collective does.
        bucket_bytes: Largest bucket, unless one parameter alone is larger.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        hosts: HostSums | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._module = module
        self._tables = [submodule._parameters for submodule in module.modules()]
        self._held: list[nn.Parameter | None] = []  # what they had at the last call
        self._flags: list[bool] = []  # which of it gets gradients
        self._group, self._hosts = group, hosts
        at_once = functools.partial(dist.all_reduce, op=dist.ReduceOp.SUM, group=group, async_op=True)
        self._start: Callable[[torch.Tensor], Sum] = at_once if hosts is None else hosts.start
        self._bucket_bytes = bucket_bytes
        self._params: list[nn.Parameter] = []
        self._buckets: list[_Bucket] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._home: dict[int, _Bucket] = {}
        self._next = 0
        self._active = False

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Everything that backward adds to `.grad` inside the block is summed over the workers when it ends.

        Several backward calls may run inside one block (micro-batches): wrap all but the last in `local()`.
        If the block raises, the gradients are as they were before it.
        """
        self._refresh()
        earlier = [p.grad for p in self._params]
        for bucket in self._buckets:
            bucket.start_over()
        for param in self._params:
            param.grad = None
        self._next, self._active = 0, True
        done = False
        try:
            yield
            self._finish()
            done = True
        finally:
            self._active = False
            if self._hosts is not None and not done:
                self._hosts.forget()
            for param, grad in zip(self._params, earlier, strict=True):
                if not done:
                    param.grad = grad
                elif grad is not None:
                    param.grad = grad if param.grad is None else grad.add_(param.grad)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside the block backward adds to `.grad` without starting a sum."""
        active, self._active = self._active, False
        try:
            yield
        finally:
            self._active = active

    def _refresh(self) -> None:
        """Lays out buckets anew where the trainable parameters are not those of the last call."""
        held = list(itertools.chain.from_iterable(map(dict.values, self._tables)))
        flags = [one is not None and one.requires_grad for one in held]
        if flags == self._flags and len(held) == len(self._held) and all(map(operator.is_, held, self._held)):
            return
        self._held, self._flags = held, flags
        params = [p for p in self._module.parameters() if p.requires_grad and _is_plain(p)]
        if len(params) == len(self._params) and all(map(operator.is_, params, self._params)):
            return
        for hook in self._hooks:
            hook.remove()
        self._params = params
        self._buckets = _lay_out(params, self._bucket_bytes, 1 if self._hosts is None else self._hosts.multiple)
        self._home = {id(p): bucket for bucket in self._buckets for p in bucket.params}
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in params]

    def _ready(self, param: torch.Tensor) -> None:
        """Runs inside backward each time `param.grad` was written."""
        if not self._active:
            return
        bucket = self._home[id(param)]
        bucket.missing.discard(id(param))
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._buckets[self._next].launch(self._start)
            self._next += 1

    def _finish(self) -> None:
        """Starts what backward left unstarted, waits for all, and hands out the sums."""
        for bucket in self._buckets[self._next :]:
            bucket.launch(self._start)
        for bucket in self._buckets:
            bucket.collect(self._group)


def _is_plain(param: nn.Parameter) -> bool:
    """Says whether the parameter is here as an ordinary tensor: neither sharded nor on another stage of a pipeline.

    What a forward has computed and put among the parameters (weights with dropout) is none: its gradient goes on to
    the parameters it was computed from.
    """
    return param.is_leaf and not isinstance(param, DTensor) and not param.is_meta


class _Bucket:
    """Some parameters whose gradients travel together in one flat buffer, followed by one flag a parameter.

    Args:
        params: The parameters.
        multiple: The buffer has a multiple of so many elements; padding follows the flags.
    """

    def __init__(self, params: list[nn.Parameter], multiple: int) -> None:
        self.params = params
        self.missing: set[int] = set()
        self._num_elements = sum(p.numel() for p in params)
        self._size = -(-(self._num_elements + len(params)) // multiple) * multiple
        ends = itertools.accumulate(p.numel() for p in params)
        self._places = [(p.shape, _usual_strides(p), end - p.numel()) for p, end in zip(params, ends)]
        self._work: Sum | None = None
        self._has_grad: list[bool] = []

    def start_over(self) -> None:
        """Makes the bucket ready for a backward call. See [Note: a buffer a backward]."""
        self.missing = {id(p) for p in self.params}
        first = self.params[0]
        self._flat = torch.empty(self._size, dtype=first.dtype, device=first.device)
        self._flags = self._flat[self._num_elements :][: len(self.params)]
        self._views = list(itertools.starmap(self._flat.as_strided, self._places))

    def launch(self, start: Callable[[torch.Tensor], Sum]) -> None:
        """Copies the gradients into the buffer and starts to sum it."""
        self._has_grad = [p.grad is not None for p in self.params]
        grads = [p.grad for p in self.params if p.grad is not None]
        views = [view for view, has in zip(self._views, self._has_grad, strict=True) if has]
        with torch.no_grad():
            if grads:
                torch._foreach_copy_(views, grads)
            if all(self._has_grad):
                self._flags.fill_(1)
            else:
                for view, has in zip(self._views, self._has_grad, strict=True):
                    if not has:
                        view.zero_()
                self._flags.copy_(torch.tensor(self._has_grad, dtype=self._flags.dtype))
        for param in self.params:
            param.grad = None
        self._work = start(self._flat)

    def collect(self, group: dist.ProcessGroup | None) -> None:
        """Waits for the sum and puts it into `.grad`. See [Note: unused parameters]."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        used = [True] * len(self.params) if all(self._has_grad) else (self._flags != 0).tolist()
        for param, view, is_used in zip(self.params, self._views, used, strict=True):
            late = param.grad
            if (
                late is not None
            ):  # backward wrote to it a second time, after the bucket had left (re-entrant checkpoint)
                dist.all_reduce(late, op=dist.ReduceOp.SUM, group=group)
                view.add_(late)
            param.grad = view if is_used else None
        del self._flat, self._flags, self._views


def _usual_strides(param: nn.Parameter) -> tuple[int, ...]:
    """Returns the strides of a tensor of this shape whose dims lie in memory in the usual order."""
    return torch.empty(param.shape, device="meta").stride()


def _lay_out(params: list[nn.Parameter], bucket_bytes: int, multiple: int) -> list[_Bucket]:
    """Returns buckets in the order in which backward is likely to fill them: the last parameter first."""
    buckets: list[_Bucket] = []
    pending: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for param in reversed(params):
        key = (param.dtype, param.device)
        size = param.numel() * param.element_size()
        if key in pending and sizes[key] + size > bucket_bytes:
            buckets.append(_Bucket(pending.pop(key), multiple))
            sizes[key] = 0
        pending.setdefault(key, []).append(param)
        sizes[key] = sizes.get(key, 0) + size
    buckets.extend(_Bucket(group, multiple) for group in pending.values())
    return buckets


def attach(module: nn.Module, group: dist.ProcessGroup | None, hosts: HostSums | None = None) -> None:
    """Makes `gradient_sync_of(module)` a `GradientSync` over `group`."""
    sync = GradientSync(module, group, hosts)
    object.__setattr__(module, _ATTRIBUTE, sync)
    attach_gradient_sync(module, sync)


def gradient_sync_of(module: nn.Module) -> GradientSync | None:
    """Returns what sums the gradients of the module's plain parameters, None where nothing has to."""
    return module.__dict__.get(_ATTRIBUTE)
