"""The device mesh of a plan: which worker stands where.

Decides the axis names and the order of ranks. Must not know models, batches or who asked for the plan.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan

REPLICATE_AXIS = "replicate"
SHARD_AXIS = "shard"


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Returns the mesh of `plan`: axes ("replicate", "shard"), the shard axis varying fastest.

    Neighbouring ranks share parameters, because neighbours usually have the fastest links and sharding talks most.

    Args:
        plan: The plan; `plan.num_devices` must be the size of the default process group.
        device_type: "cuda" or "cpu".

    Raises:
        PlanError: The plan needs another number of devices than the process group has.
    """
    world = dist.get_world_size()
    if plan.num_devices != world:
        raise PlanError(
            f"the plan {plan} needs {plan.num_devices} devices, the accelerator has {world}",
            f"replicate x shard = {world}",
            f'plan="replicate={world}"',
        )
    return init_device_mesh(device_type, (plan.replicate, plan.shard), mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS))
