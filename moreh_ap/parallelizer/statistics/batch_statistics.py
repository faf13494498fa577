"""Batch normalisation over the rows of all workers, forward and backward, and running statistics of instances.

Decides how statistics of slices become those of the batch. Must not know models, plans or how a batch was cut. Whether
a forward is right with them is for `trial.joined_probe` to show.

[Note: statistics of slices]
Each worker counts its elements of a channel, their mean, and the sum of their squared distances from that mean. These
three numbers are gathered and combined in float64 as Chan, Golub and LeVeque combine parts of a sample ("Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979), which loses no digits where a mean is large
beside its deviation. Slices may differ in length, and one may have a single value a channel.

The gradient of an input has two more sums over the batch: of the gradients of the outputs, and of these times the
normalised inputs. Each worker adds those of its rows, and all of them get the total. Gradients of weight and bias are
sums over this worker's rows: they are summed over workers with those of all other parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.loss.mean_functions import EMBEDS, NORMALISES, OBSERVES, takes_statistics
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.statistics.batch_parts import BatchParts
from moreh_ap.parallelizer.statistics.embedding_norms import with_norms_of_batch

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since PyTorch 2.13
_BATCH_NORM, _INSTANCE_NORM = inspect.signature(F.batch_norm), inspect.signature(F.instance_norm)


class JoinedReduction(GlobalReduction):
    """A `GlobalReduction` under which batch normalisation takes the statistics of the rows of all workers, and
    embeddings are renormalised by them.

    Args:
        device: See `GlobalReduction`, as of all other arguments.
        parts: The normalisations that take the statistics of parts of the batch instead; None: there are none.
    """

    def __init__(self, device: torch.device, *, parts: BatchParts | None = None, **others: Any) -> None:
        super().__init__(device, **others)
        self._parts = parts

    def finish(self, result: Any, settled: Callable[[Any], Any]) -> Any:
        if self._parts is not None:
            if self.before_meeting is not None:
                self.before_meeting()
            self._parts.put_together(partial(_gather, axis=self.axis))
        return result

    def replay(self, sites: slice) -> GlobalReduction:
        known = self.global_denominators[sites]
        return JoinedReduction(self.device, axis=self.axis, denominators=known, rules=self.rules, parts=self._parts)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        takes = func in NORMALISES and takes_statistics(func, args, kwargs or {})
        if takes and self.before_meeting is not None:
            self.before_meeting()
        if takes and func in EMBEDS:
            call = with_norms_of_batch(func, args, kwargs or {}, self.axis)
            return func(*call.args, **call.kwargs)
        if takes and func is OBSERVES:
            return observe(self.axis, *args, **(kwargs or {}))
        if func is F.batch_norm:
            call = _BATCH_NORM.bind(*args, **(kwargs or {}))
            call.apply_defaults()
            if call.arguments["training"]:
                if self._parts is not None and self._parts.take(call.arguments):
                    return func(*args, **kwargs or {})
                return batch_norm(self.axis, call.arguments)
        if func is F.instance_norm:
            result = func(*args, **(kwargs or {}))
            call = _INSTANCE_NORM.bind(*args, **(kwargs or {}))
            call.apply_defaults()
            if call.arguments["use_input_stats"]:
                _average(call.arguments, self.axis)
            return result
        return super().__torch_function__(func, types, args, kwargs)


def batch_norm(axis: Axis, given: dict[str, Any]) -> Tensor:
    """Returns what `torch.nn.functional.batch_norm` gives for this worker's rows of the batch, of shape (B, C, ...).

    Running statistics become those of one device, on every worker.

    Args:
        axis: The workers that share the batch. A collective of all of them, also in the backward.
        given: The arguments of the function, by name.

    Raises:
        ValueError: The batch has one value a channel, as PyTorch raises it.
    """
    x, running_mean, running_var = given["input"], given["running_mean"], given["running_var"]
    count, mean_C, var_C = _statistics(x.detach(), axis)
    if x.numel() <= x.shape[1] and int(count) == 1:  # reading the number would make a GPU wait for nothing
        size = (axis.size, *x.shape[1:])
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {torch.Size(size)}")
    with torch.no_grad():
        momentum = given["momentum"]
        if running_mean is not None:
            running_mean.lerp_(mean_C.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((var_C * count / (count - 1)).to(running_var.dtype), momentum)
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean_C, var_C = mean_C.to(kind), var_C.to(kind)
    return _Normalise.apply(x, given["weight"], given["bias"], mean_C, var_C, count, given["eps"], axis)


def observe(axis: Axis, x: Tensor, observes: Tensor, *others: Any) -> Tensor:
    """Returns what `torch.fused_moving_avg_obs_fake_quant` gives for this worker's rows; the running extremes in its
    arguments become those of one device.

    The function gets the extremes of all workers behind the rows, as values of their own.

    Args:
        axis: The workers that share the batch. A collective of all of them.
        x: The rows, of any shape.
        observes: See the function, as of all other arguments.
    """
    *others_before, channel_dim, has_channels, is_symmetric = others
    values_CN = x.movedim(channel_dim, 0) if has_channels else x.unsqueeze(0)
    values_CN, shape = values_CN.flatten(1), values_CN.shape
    low_C, high_C = torch.aminmax(values_CN.detach(), dim=1)
    low_WC, high_WC = _gather(torch.stack([low_C, high_C]), axis).unbind(1)
    extremes_C2 = torch.stack([low_WC.amin(0), high_WC.amax(0)], dim=1)
    all_CN = torch.cat([values_CN, extremes_C2], dim=1)
    result_CN = OBSERVES(all_CN, observes, *others_before, 0 if has_channels else -1, has_channels, is_symmetric)
    result = result_CN[:, :-2].reshape(shape)
    return result.movedim(0, channel_dim) if has_channels else result.squeeze(0)


def _statistics(x: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the number of elements a channel, their mean and their variance, over all workers, in float64."""
    channels, count = x.shape[1], x.numel() // max(1, x.shape[1])
    kept = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if count:  # one pass; `torch.var_mean` takes three times as long on a CPU
        mean_C, var_C = torch.batch_norm_update_stats(kept, None, None, 0.0)
    else:  # a worker whose rows left nothing
        var_C = mean_C = kept.new_zeros(channels)
    own = torch.cat([mean_C, var_C, mean_C.new_full((1,), count, dtype=torch.float64)])  # in float64, as its last part
    mean_WC, var_WC, count_W1 = _gather(own, axis).split((channels, channels, 1), dim=1)
    total = count_W1.sum()
    share_W = count_W1.squeeze(1) / total
    mean_C = share_W @ mean_WC
    from_mean_WC = mean_WC - mean_C
    return total, mean_C, share_W @ torch.addcmul(var_WC, from_mean_WC, from_mean_WC)


def _gather(own: Tensor, axis: Axis) -> Tensor:
    """Returns the workers' tensors, one a row, in rank order."""
    all_WN = own.new_empty(axis.size * own.numel())
    all_gather(all_WN, own.flatten(), group=axis.group)
    return all_WN.view(axis.size, *own.shape)


def _sum(own: Tensor, axis: Axis) -> Tensor:
    """Returns the sum of the workers' tensors. For some numbers a channel: a gather needs one exchange, where gloo's
    sum needs several, and each wakes threads that sleep."""
    return _gather(own, axis).sum(0)


def _average(given: dict[str, Any], axis: Axis) -> None:
    """Makes the running statistics of instance normalisation, averages over this worker's rows, those of all rows."""
    running = [one for one in (given["running_mean"], given["running_var"]) if one is not None]
    if running:
        rows = float(given["input"].shape[0])
        sums = torch.cat([*(one.detach().double() * rows for one in running), running[0].new_tensor([rows]).double()])
        sums = _sum(sums, axis)
        for one, value in zip(running, (sums[:-1] / sums[-1]).chunk(len(running)), strict=True):
            one.detach().copy_(value)


class _Normalise(torch.autograd.Function):
    """Normalises with statistics of the batch; their dependence on every row is part of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean_C: Tensor,
        var_C: Tensor,
        count: Tensor,
        eps: float,
        axis: Axis,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, mean_C, var_C, count)
        ctx.eps, ctx.axis = eps, axis
        return torch.batch_norm(x, weight, bias, mean_C, var_C, False, 0.0, eps, torch.backends.cudnn.enabled)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias, mean_C, var_C, count = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            inputs = [one for one in (x, weight, bias) if one is not None and one.requires_grad]
            normalised = _normalised_by_parts(x, weight, bias, count, ctx.eps, ctx.axis)
            found = iter(torch.autograd.grad(normalised, inputs, grad, create_graph=True))
            grads = [next(found) if one is not None and one.requires_grad else None for one in (x, weight, bias)]
            return (*grads, None, None, None, None, None)
        scale_C = torch.rsqrt(var_C + ctx.eps)
        # This worker's sums over its rows.
        given = torch.ones_like(scale_C) if weight is None else weight
        _, dot_C, sum_C = torch.ops.aten.native_batch_norm_backward(
            grad.contiguous(memory_format=_format_of(x)),
            x,
            given.to(mean_C.dtype),
            mean_C,
            var_C,
            None,
            None,
            False,
            ctx.eps,
            [False, True, True],
        )
        total_2C = _sum(torch.cat([dot_C, sum_C]).to(mean_C.dtype), ctx.axis)
        mean_dot_C, mean_sum_C = (total_2C / count.to(mean_C.dtype)).chunk(2)
        through_C = given.to(mean_C.dtype) * scale_C
        slope_C, shift_C = -through_C * scale_C * mean_dot_C, -through_C * mean_sum_C
        # (x - mean) * slope + shift in one pass, as normalisation with a variance of one.
        grad_x = torch.batch_norm(x, slope_C, shift_C, mean_C, torch.ones_like(mean_C), False, 0.0, 0.0, False)
        grad_x = grad_x.addcmul_(grad, through_C.to(x.dtype).view(1, -1, *(1 for _ in x.shape[2:])))
        grad_weight = None if weight is None else dot_C.to(weight.dtype)
        grad_bias = None if bias is None else sum_C.to(bias.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _normalised_by_parts(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, eps: float, axis: Axis
) -> Tensor:
    """Returns the same from operations that autograd can differentiate any number of times."""
    dims, shape = [dim for dim in range(x.ndim) if dim != 1], (1, -1, *(1 for _ in x.shape[2:]))
    number = count.to(torch.float32 if x.dtype != torch.float64 else x.dtype)
    mean = (SumOverWorkers.apply(x.sum(dims), axis) / number).view(shape)
    var = (SumOverWorkers.apply((x - mean).square().sum(dims), axis) / number).view(shape)
    result = (x - mean) * torch.rsqrt(var + eps)
    if weight is not None:
        result = result * weight.view(shape)
    return result if bias is None else result + bias.view(shape)


class SumOverWorkers(torch.autograd.Function):
    """The sum of the workers' tensors, on every worker; so is the gradient, since every worker uses the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        total = part.detach().clone()
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return SumOverWorkers.apply(grad.contiguous(), ctx.axis), None


def _format_of(x: Tensor) -> torch.memory_format:
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if x.ndim == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return torch.contiguous_format
