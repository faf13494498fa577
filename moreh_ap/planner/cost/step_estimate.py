"""The predicted time of a training step, by where it goes.

Decides what belongs to the total, and the rates that follow from it. Must not know how any part is estimated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

__all__ = ["StepEstimate"]


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of one step of the slowest device, by where they go; hidden ones overlap with computation.

    Attributes:
        forward_s: Computing forward.
        backward_s: Computing backward.
        recompute_s: Recomputing activations that were not kept.
        host_s: Waiting for the host to start kernels.
        tensor_s: Communication of the tensor axis that nothing hides.
        tensor_hidden_s: The same, hidden.
        data_s: Gathering weights and summing gradients, and copying both between host and device where a plan keeps
            them in host memory, as far as nothing hides it.
        data_hidden_s: The same, hidden.
        pipeline_s: Messages between stages that nothing hides.
        pipeline_hidden_s: The same, hidden.
        bubble_s: Waiting for the pipeline to fill and drain.
        optimizer_s: The optimizer's step.
        fixed_s: Seconds that every step takes, whatever the model.
        tokens: Tokens of the step on all devices.
        num_devices: Devices.
        model_flops: Floating-point operations that the model needs for the step, nothing recomputed.
        peak_flops: Peak rate of one device, operations a second.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    host_s: float
    tensor_s: float
    tensor_hidden_s: float
    data_s: float
    data_hidden_s: float
    pipeline_s: float
    pipeline_hidden_s: float
    bubble_s: float
    optimizer_s: float
    fixed_s: float
    tokens: float
    num_devices: int
    model_flops: float
    peak_flops: float

    @property
    def components(self) -> list[tuple[str, float, float]]:
        """Where the time goes: labels, seconds that count, and seconds that overlap with computation and do not."""
        return [
            ("forward", self.forward_s, 0.0),
            ("backward", self.backward_s, 0.0),
            ("recomputation", self.recompute_s, 0.0),
            ("host", self.host_s, 0.0),
            ("tensor axis", self.tensor_s, self.tensor_hidden_s),
            ("data axes", self.data_s, self.data_hidden_s),
            ("pipeline messages", self.pipeline_s, self.pipeline_hidden_s),
            ("bubble", self.bubble_s, 0.0),
            ("optimizer", self.optimizer_s, 0.0),
            ("fixed", self.fixed_s, 0.0),
        ]

    def scaled(self, factor: float) -> StepEstimate:
        """Returns the same with every component `factor` times as long."""
        parts = {one.name: getattr(self, one.name) * factor for one in fields(self) if one.name.endswith("_s")}
        return replace(self, **parts)

    @cached_property
    def total_s(self) -> float:
        """Seconds of the step."""
        return (
            self.forward_s
            + self.backward_s
            + self.recompute_s
            + self.host_s
            + self.tensor_s
            + self.data_s
            + self.pipeline_s
            + self.bubble_s
            + self.optimizer_s
            + self.fixed_s
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second on all devices."""
        return self.tokens / self.total_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens a second and device."""
        return self.tokens_per_s / self.num_devices

    @property
    def mfu(self) -> float:
        """Part of the peak rate that the model's own operations use. Source: Chowdhery et al., "PaLM", 2022, app. B."""
        return self.model_flops / (self.total_s * self.num_devices * self.peak_flops)
