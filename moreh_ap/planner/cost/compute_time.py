"""How long one device computes a layer, or a segment of a model, for a micro-batch.

Decides the rates of matrix products by their shape, of attention, of elementwise work and of starting kernels. Must not
know pipelines, collectives or steps.

[Note: rates]
A product of m tokens with an (inner x outer) matrix runs at the device's sustained rate times m / (m + m0) times
w / (w + w0), w the shorter of inner and outer: small products leave matrix units idle, read more for each operation and
pay for their start. Elementwise work is bound by memory. What the host cannot start in time is bound by the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.coefficients import Coefficients
from moreh_ap.planner.cost.hardware import Device
from moreh_ap.planner.cost.measured_collectives import rate_at
from moreh_ap.planner.cost.training_systems import TrainingSystem
from moreh_ap.planner.profiles.model_profile import BYTES_PER_VALUE, LayerProfile

__all__ = ["LayerTime", "layer_time"]


LOGIT_BYTES = 14.0
"""Bytes that the forward of a loss over a vocabulary moves for each logit: the product's result in 16 bits, read and
written in float32 by the cast, the exponential and the sum."""

SCORE_PASSES = 2.0
"""How often attention that is not fused moves what it keeps of the scores: softmax and dropout read and write them. It
also computes what a causal mask throws away, twice the operations."""

HALF_HEAD = 32.0
"""Width of a head at which attention has half of its rate. Source: Dao, "FlashAttention-2", 2023, figures 4 to 7."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds that a layer takes for one micro-batch on one device.

    Attributes:
        forward_s: The forward on the device.
        backward_s: The backward on the device.
        host_forward_s: What the host needs to start the forward's kernels.
        host_backward_s: The same of the backward.
    """

    forward_s: float
    backward_s: float
    host_forward_s: float
    host_backward_s: float


def layer_time(
    layer: LayerProfile,
    rows: int,
    sequence_length: int,
    plan: Plan,
    device: Device,
    system: TrainingSystem,
    coefficients: Coefficients,
    logits_per_token: int = 0,
) -> LayerTime:
    """Returns the seconds that a layer takes on a device. See [Note: rates].

    Args:
        layer: The layer, whole.
        rows: Rows of a micro-batch.
        sequence_length: Positions of a row.
        plan: How it is split over devices, and in which precision it computes.
        device: The device.
        system: How the program executes plans.
        coefficients: Constants of devices.
        logits_per_token: Logits that the layer gives to a loss over a vocabulary; 0: none.
    """
    precision, tensor = plan.precision, plan.tensor
    tokens = float(rows * sequence_length)
    matrix_precision = system.matrix_precision if system.matrix_precision and precision == "bf16" else precision
    rate = device.peak_flops(matrix_precision) * device.sustained
    half_tokens, half_width = coefficients.half_tokens, coefficients.half_width
    products = 0.0
    for product in layer.products:
        inner: float = product.inner
        outer: float = product.outer
        if product.split == "inner":
            inner /= tensor
        elif product.split == "outer":
            outer /= tensor
        width = inner if inner < outer else outer
        if not width:  # a table of no entries, such as the memories of a layer that is made with none
            continue
        used = tokens * product.share
        each = used / product.copies
        slowed = (1.0 + half_tokens / each) * (1.0 + half_width / width)
        products += 2.0 * used * inner * outer * slowed / rate
    attention = 0.0
    if layer.attention_flops_per_row:
        attention = rows * layer.attention_flops_per_row / tensor * (1.0 if system.fused_attention else 2.0)
        attention /= device.peak_flops(precision) * device.sustained * device.attention
        attention *= 1.0 + HALF_HEAD / layer.attention_width
    wide = plan.bytes_per_value / BYTES_PER_VALUE
    whole = 1.0 / tensor if plan.sequence_parallel else 1.0
    moved = layer.moved_split_bytes_per_token / tensor + layer.moved_replicated_bytes_per_token * whole
    moved *= tokens * wide
    bandwidth = _elementwise_bytes_per_s(device, moved, coefficients)
    elementwise = moved * system.fused_elementwise / bandwidth
    if not system.fused_attention:
        elementwise += rows * SCORE_PASSES * layer.score_bytes_per_row / tensor * wide / bandwidth
    if logits_per_token:
        logits = tokens * logits_per_token / tensor * LOGIT_BYTES
        elementwise += logits / _elementwise_bytes_per_s(device, logits, coefficients)
    kernels = layer.num_kernels * system.fused_elementwise
    host = kernels * system.host_s_per_kernel
    started = kernels * coefficients.kernel_s
    aside = elementwise + started
    both_gradients = 2.0 if system.trains_weights else 1.0
    return LayerTime(
        forward_s=products + attention / coefficients.attention_forward + aside,
        backward_s=both_gradients * products + 2.5 * attention / coefficients.attention_backward + 2.0 * aside,
        host_forward_s=host,
        host_backward_s=1.5 * host,
    )


def _elementwise_bytes_per_s(device: Device, moved_bytes: float, coefficients: Coefficients) -> float:
    if device.elementwise:
        return rate_at(device.elementwise, moved_bytes)
    return device.memory_bytes_per_s * coefficients.memory
