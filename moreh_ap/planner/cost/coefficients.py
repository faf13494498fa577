"""The few constants of the cost model that no data sheet states.

Decides their values; `scripts/fit_planner.py` finds them again from measured runs. Must not know models, plans or
programs: each constant is a property of matrix units, memories, networks or allocators.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COEFFICIENTS", "Coefficients"]


@dataclass(frozen=True)
class Coefficients:
    """Constants of the cost model.

    Attributes:
        half_tokens: Tokens of a product at which it reaches half of the rate that it has with very many.
        half_width: Likewise for the shorter of its inner and outer lengths.
        attention_forward: Part of a device's sustained rate that fused attention reaches in the forward.
        attention_backward: Likewise in the backward, which takes 2.5 times the operations. Source: Dao,
            "FlashAttention-2", 2023, section 4.1.
        memory: Part of the peak memory bandwidth that elementwise kernels reach.
        kernel_s: Seconds that a kernel takes on the device however small it is.
        bucket_parameters: Parameters whose gradients travel together.
        message_s: Seconds that sender and receiver of a pipeline's message need to agree on it.
        host_bytes_per_s: Bytes a second between a device and its host's memory, one way at a time. Source: PCIe 4.0, 16
            lanes, 31.5 GB/s, of which copies of pinned memory reach about 0.8.
        host_step_bytes_per_s: Bytes a second that an optimizer of PyTorch reads and writes on the processors of a host.
            An assumption, for no host with a GPU was measured: a tenth of eight channels of DDR4-3200, 204.8 GB/s.
        pinned: Bytes of pinned host memory for each byte asked for. Source: powers of two, whose mean over sizes is a
            third above (`runtime/worker/optimizer_offload.py`).
        step_s: Seconds of a step that depend on nothing: the loop, logging, the scheduler.
        fragmentation: Part of the transient memory that the allocator holds beyond what is allocated.
        reserved_bytes: What it holds in any case: workspaces, and halves of segments.
    """

    half_tokens: float = 133
    half_width: float = 76.3
    attention_forward: float = 0.55
    attention_backward: float = 0.45
    memory: float = 0.711
    kernel_s: float = 4e-6
    bucket_parameters: float = 8.69e06
    message_s: float = 1e-5
    host_bytes_per_s: float = 2.5e10
    host_step_bytes_per_s: float = 2.0e10
    pinned: float = 4.0 / 3.0
    step_s: float = 0.0229
    fragmentation: float = 0.05
    reserved_bytes: float = 0.5 * 2**30


COEFFICIENTS = Coefficients()
"""The values that every prediction uses where it is not told others."""
