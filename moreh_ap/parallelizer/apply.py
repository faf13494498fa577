"""Applies a plan to a module: what is split, sharded, replicated or recomputed, and in which precision.

Decides in which order a plan becomes torch-native machinery. Must not know batches, losses, checkpoints, the controller
or the engine.

[Note: gradients are sums]
A worker's loss is its share of the global loss (see `loss_reduction.py`), so gradients are summed over the workers that
share the batch and divided by nothing. FSDP2 averages by default; both its factor and its operation are set
(`data/fsdp.py`), because only the plain SUM exists on every back end.

[Note: which machinery]
shard > 1 or offload=all: FSDP2 (it keeps float32 shards and computes on bf16 copies). Replication: the parameters stay
ordinary tensors and `GradientSync` sums their gradients. Measured beside DistributedDataParallel on two CPU workers
(Llama, 6 layers, hidden 512, fp32): GradientSync took 1.01 times its CPU time a step, FSDP2 with a shard axis of one
and `replicate` on FSDP2's machinery 1.16 and 1.17 times its wall time, because they copy every parameter. One device:
nothing at all in fp32. In bf16, models that are not sharded compute on copies (`precision/computing_copies.py`), but
for pipelines and for gradients in bf16 that are added up, which are FSDP2's.

[Note: order]
1. Tensor parallelism first: whatever follows sees this worker's smaller parameters as if they were whole.
2. The cut into stages: only what this worker holds is handled further.
3. Recomputation of blocks, then the compiler, whose graphs have the recomputation in them, then FSDP2 around both, so
that a block is gathered before it runs, and its hooks are in no graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moreh_ap.errors import PlanError
from moreh_ap.parallelizer.call.extension import CallExtension
from moreh_ap.parallelizer.compiling.chosen_blocks import blocks_of_requests
from moreh_ap.parallelizer.compiling.compiled_blocks import compile_blocks
from moreh_ap.parallelizer.data import bucketed_allreduce, unused_parameters
from moreh_ap.parallelizer.data.fsdp import (
    batch_normalizations,
    fsdp_modules,
    only_copied,
    param_groups,
    shard,
    unshardable,
    uses_fsdp,
    with_own_parameters,
)
from moreh_ap.parallelizer.data.recompute import apply_recompute
from moreh_ap.parallelizer.group_sums import host_sums
from moreh_ap.parallelizer.mesh import TENSOR_AXIS, Position
from moreh_ap.parallelizer.pipeline import stages
from moreh_ap.parallelizer.pipeline.stages import Stages
from moreh_ap.parallelizer.pipeline.streaming import Streaming
from moreh_ap.parallelizer.pipeline.trace import trace
from moreh_ap.parallelizer.precision.computing_copies import compute_in
from moreh_ap.parallelizer.precision.output_precision import PROMISES, results_in
from moreh_ap.parallelizer.state import parameter_identity
from moreh_ap.parallelizer.state.tensor_layout import TensorLayout
from moreh_ap.parallelizer.tensor.crossing import Crossing
from moreh_ap.parallelizer.tensor.tensor_parallel import TensorParallel, apply_tensor_parallel
from moreh_ap.plan import Plan
from moreh_ap.protocol.blocks import block_lists, module_that_renames, modules_aside, repeated_blocks
from moreh_ap.protocol.messages.compile_requests import CompileRequests


@dataclass(frozen=True)
class Example:
    """A call of the module as the script makes it: what a pipeline's cut is found with.

    Attributes:
        meta_module: A copy of the module on meta that no plan was applied to.
        args: Positional arguments, with values.
        kwargs: Keyword arguments, likewise.
    """

    meta_module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class AppliedPlan:
    """The result of applying a plan to a module on this worker.

    Attributes:
        plan: The plan.
        position: This worker's position in the mesh.
        tensor: What tensor parallelism did; None without it.
        stages: This worker's stages; None without a pipeline.
        layouts: What tensor parallelism left here of parameters, by name.
        extensions: What the plan needs around forwards of the module.
    """

    plan: Plan
    position: Position
    tensor: TensorParallel | None = None
    stages: Stages | None = None
    layouts: Mapping[str, TensorLayout] = field(default_factory=dict)
    extensions: tuple[CallExtension, ...] = ()

    @property
    def absent(self) -> frozenset[str]:
        """Names of the parameters that this worker does not hold."""
        return frozenset() if self.stages is None else self.stages.absent


def apply_plan(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    device: torch.device | None = None,
    example: Example | None = None,
    compiled: CompileRequests = (),
) -> AppliedPlan:
    """Changes `module` in place so that its forward and backward follow `plan`. See [Note: order].

    Args:
        module: The whole model on meta, or with its values on this worker's device.
        plan: The plan, the same on every worker.
        mesh: What `build_mesh` made of the plan.
        device: This worker's device; needed for a pipeline and for compiled blocks.
        example: A call of the module; needed for a pipeline.
        compiled: What the script has compiled, for a plan with `compile=blocks`; empty: the plan alone asks for it.

    Raises:
        PlanError: The model cannot be split so; the text says why and what can be done instead.
    """
    by_fsdp = uses_fsdp(module, plan)
    casts = plan.precision != "fp32"
    _check_parameters_are_attributes(module, plan, is_replaced=by_fsdp or casts)
    position = Position.of(mesh)
    tensor = None
    if plan.tensor > 1:
        tensor = apply_tensor_parallel(module, mesh[TENSOR_AXIS], sequence_parallel=plan.sequence_parallel)
    here = None
    if plan.pipeline > 1:
        assert example is not None and device is not None
        found = trace(example.meta_module, example.args, example.kwargs, device)
        crossing = Crossing(mesh[TENSOR_AXIS]) if plan.sequence_parallel else None
        here = Stages(module, example.meta_module, plan, position.pipeline, found, device, crossing)
        stages.attach(module, here)
    local = [list(stage.blocks) for stage in here.local.values()] if here else list(block_lists(module).values())
    _check_blocks(module, plan, local)
    for blocks in local:
        apply_recompute(blocks, plan.recompute, stop_early=plan.tensor == 1)
    if plan.compile == "blocks":
        assert device is not None
        _compile(module, local, device, compiled, casts=casts, by_fsdp=by_fsdp)
    _spread_over_data(module, plan, mesh, position, here, by_fsdp=by_fsdp)
    extensions = () if here is None else (Streaming(module, here),)
    return AppliedPlan(plan, position, tensor, here, tensor.layouts if tensor else {}, extensions)


def _check_parameters_are_attributes(module: nn.Module, plan: Plan, *, is_replaced: bool) -> None:
    """Checks that parameters can be found and replaced by name.

    Args:
        module: The whole model.
        plan: The plan.
        is_replaced: Whether shards or copies take the place of parameters.

    Raises:
        PlanError: A module is not registered, or its parameters have other names than its attributes.
    """
    aside = modules_aside(module)
    fix = f'plan="replicate={plan.num_devices}", mixed_precision=False'
    if aside and (is_replaced or plan.tensor * plan.pipeline > 1):
        raise PlanError(
            f"{type(module).__name__} keeps a {type(aside[0]).__name__} in a list or dict of Python, where "
            f"plan={str(plan)!r} does not find it",
            "plans with replicate alone in float32, or nn.ModuleList and nn.ModuleDict",
            fix,
        )
    unusual = module_that_renames(module) if is_replaced else None
    if unusual is not None:
        raise PlanError(
            f"{type(unusual).__name__} gives its parameters names that are not attributes of modules, and "
            f"plan={str(plan)!r} puts shards or copies in their place by name",
            "plans with replicate alone in float32",
            fix,
        )


def _check_blocks(module: nn.Module, plan: Plan, local: Sequence[Sequence[nn.Module]]) -> None:
    """Checks that a plan that recomputes or compiles blocks has some.

    Raises:
        PlanError: This worker has no repeated blocks.
    """
    for name in ("recompute", "compile"):
        value = getattr(plan, name)
        if value != "none" and not local:
            raise PlanError(
                f"{name}={value} needs repeated blocks, and {type(module).__name__} has none",
                f"{name}=none, or a model with a list of equal blocks",
                f'plan="{name}=none"',
            )


def _compile(
    module: nn.Module,
    local: Sequence[Sequence[nn.Module]],
    device: torch.device,
    asked: CompileRequests,
    *,
    casts: bool,
    by_fsdp: bool,
) -> None:
    """Has this worker's blocks run compiled, as the script asks; all of them if only the plan does."""
    blocks = [block for members in local for block in members]
    for request, chosen in blocks_of_requests(module, blocks, asked):
        compile_blocks(chosen, request, device, casts=casts, gathers=by_fsdp)


def _spread_over_data(
    module: nn.Module, plan: Plan, mesh: DeviceMesh, position: Position, here: Stages | None, *, by_fsdp: bool
) -> None:
    """Shards or replicates what this worker holds. See [Note: which machinery]."""
    plain = unshardable(module)
    if here is not None:
        inside = {id(p) for stage in here.local.values() for p in stage.parameters()}
        plain |= {p for name, p in module.named_parameters() if id(p) not in inside or name in here.absent}
    if by_fsdp:
        if position.data.size == 1:
            plain |= only_copied(module, plan)
        roots = [module] if here is None else list(here.local.values())
        blocks = [block for root in roots for block in repeated_blocks(root)]
        originals, tied = parameter_identity.originals(module), parameter_identity.tied(module)
        shard(module, roots, blocks, plan, mesh, plain)
        groups = [group for submodule in fsdp_modules(module) for group in param_groups(submodule)]
        managed = [one for group in groups for one in group.fsdp_params]
        parameter_identity.keep_tied(tied, managed)
        parameter_identity.keep(originals, managed)
    elif plan.precision != "fp32":
        _compute_on_copies(module, plain)
    if position.data.size > 1 and (not by_fsdp or plain):
        group = position.data.group
        bucketed_allreduce.attach(module, group, host_sums(group, mesh.device_type))
    if position.data.size > 1 and by_fsdp:
        unused_parameters.attach(module, position.data.group)


def _compute_on_copies(module: nn.Module, plain: Collection[nn.Parameter]) -> None:
    """Has a model that nothing shards compute in bfloat16, but for batch normalisations, and promise float32."""
    low, blocks = torch.bfloat16, with_own_parameters(module, repeated_blocks(module))
    compute_in(module, low, blocks, batch_normalizations(module), plain)
    module.register_forward_hook(results_in(low, torch.float32))
    object.__setattr__(module, PROMISES, True)
