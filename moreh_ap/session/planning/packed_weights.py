"""Frozen weights that are packed into fewer bits than a value of PyTorch has, as the planner sees them.

Decides what counts as packed, how large it is, and which plans there are for it. A packed parameter is a tensor of
bytes with the constants of its quantization, and the shape of what it stands for, in its attribute `quant_state`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.search.constraints import Constraints


def is_packed(parameter: nn.Parameter) -> bool:
    """Returns whether a parameter holds packed values."""
    return not parameter.requires_grad and getattr(parameter, "quant_state", None) is not None


def has_packed_weights(root: nn.Module) -> bool:
    """Returns whether a parameter of a model is packed."""
    return any(map(is_packed, root.parameters()))


def num_values(parameter: nn.Parameter) -> int:
    """Returns the number of weights that a parameter stands for."""
    return math.prod(parameter.quant_state.shape) if is_packed(parameter) else parameter.numel()  # type: ignore[attr-defined]


def stored_bytes(parameter: nn.Parameter) -> int:
    """Returns the bytes of a parameter, without the constants of its quantization."""
    return parameter.numel() * parameter.element_size()


def constant_bytes(parameter: nn.Parameter) -> int:
    """Returns the bytes of the constants of a parameter's quantization, of which each device has all."""
    if not is_packed(parameter):
        return 0
    state = parameter.quant_state  # type: ignore[attr-defined]
    constants: Iterable[object] = (state.absmax, state.offset, getattr(state.state2, "absmax", None))
    return sum(one.numel() * one.element_size() for one in constants if isinstance(one, Tensor))


def with_plans_for_packed(constraints: Constraints, given: Plan | None) -> Constraints:
    """Returns what is left for a model with packed weights: replicas and shards, its own precisions.

    Raises:
        PlanError: The script gives another plan.
    """
    if given is not None and (given.tensor > 1 or given.pipeline > 1 or given.precision != "fp32"):
        what = "a tensor axis or a pipeline" if given.tensor * given.pipeline > 1 else "precision=bf16"
        raise PlanError(
            f"plan={str(given)!r} has {what}, and weights of 4 bits stay as their library has packed them",
            "replicate and shard, with micro_batches, recompute and offload; bfloat16 by bnb_4bit_compute_dtype",
            f'torch.moreh.option.enable_advanced_parallelization(plan="shard={given.num_devices}")',
        )
    return replace(constraints, pipeline_parallel=False, tensor_degrees=(1,), mixed_precision=False)
