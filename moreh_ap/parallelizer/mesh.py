"""The device mesh of a plan: which position each worker has along each axis.

Decides the axis names and the order of ranks. Must not know models, batches or who asked for the plan.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import get_rank, get_world_size, is_initialized

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan

PIPELINE_AXIS = "pipeline"
REPLICATE_AXIS = "replicate"
SHARD_AXIS = "shard"
TENSOR_AXIS = "tensor"
_AXES = (PIPELINE_AXIS, REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS)


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Returns the mesh of `plan`: axes ("pipeline", "replicate", "shard", "tensor"), the last varying fastest.

    Neighbouring ranks usually have the fastest links. Tensor parallelism talks most, inside every layer; sharding talks
    once a layer; stages of a pipeline only at their borders.

    Args:
        plan: The plan; `plan.num_devices` must be the size of the default process group.
        device_type: "cuda" or "cpu".

    Raises:
        PlanError: The plan needs another number of devices than the process group has.
    """
    world = get_world_size()
    if plan.num_devices != world:
        raise PlanError(
            f"the plan {plan} needs {plan.num_devices} devices, the accelerator has {world}",
            f"replicate x shard x tensor x pipeline = {world}",
            f'plan="replicate={world}"',
        )
    shape = (plan.pipeline, plan.replicate, plan.shard, plan.tensor)
    return _mesh(shape, device_type, dist.distributed_c10d._get_default_group())


@functools.cache
def _mesh(shape: tuple[int, ...], device_type: str, world: dist.ProcessGroup) -> DeviceMesh:
    """Returns the one mesh of this shape: every process group has threads and connections of its own."""
    return init_device_mesh(device_type, shape, mesh_dim_names=_AXES)


@functools.cache
def subgroup(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the one group of these ranks of `world`. A collective of all ranks of `world` the first time."""
    return dist.new_group(list(ranks))


def own_subgroup(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Returns the one group of these ranks, of which this worker is one. A collective of these the first time."""
    return _own_subgroup(ranks, dist.distributed_c10d._get_default_group())


@functools.cache
def _own_subgroup(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(list(ranks), use_local_synchronization=True)


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, or several taken together, seen from one worker.

    Attributes:
        rank: This worker's place on it.
        size: Number of workers along it.
        group: The workers that differ from this one only along it; None for all workers.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None


def world_axis() -> Axis:
    """Returns all workers as one axis; this process alone where no process group was made."""
    return Axis(get_rank(), get_world_size(), None) if is_initialized() else Axis(0, 1, None)


@dataclass(frozen=True)
class Position:
    """This worker's position in the mesh of a plan.

    Attributes:
        data: The workers that share the batch during training: replicate and shard axes together.
        rows: The workers that share the batch of a forward without gradients: stages of a pipeline take part, each
            with rows of its own.
        tensor: The workers that split every layer.
        pipeline: The workers that hold the other stages.
        replicas: The workers that hold the same shards of parameters as this one.
    """

    data: Axis
    rows: Axis
    tensor: Axis
    pipeline: Axis
    replicas: Axis

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Position:
        """Returns this worker's position. A collective the first time: process groups are made."""
        # On the mesh and not in a table: meshes of two worlds compare equal, and their groups are not the same.
        if "_moreh_position" not in mesh.__dict__:
            mesh.__dict__["_moreh_position"] = cls._look(mesh)
        return mesh.__dict__["_moreh_position"]

    @classmethod
    def _look(cls, mesh: DeviceMesh) -> Position:
        return cls(
            data=_flat(mesh, REPLICATE_AXIS, SHARD_AXIS),
            rows=_flat(mesh, PIPELINE_AXIS, REPLICATE_AXIS, SHARD_AXIS),
            tensor=_axis(mesh[TENSOR_AXIS]),
            pipeline=_axis(mesh[PIPELINE_AXIS]),
            replicas=_axis(mesh[REPLICATE_AXIS]),
        )


def _flat(mesh: DeviceMesh, *names: str) -> Axis:
    submesh = mesh[names]
    return _axis(submesh._flatten("_".join(names)) if len(names) > 1 else submesh)


def _axis(mesh: DeviceMesh) -> Axis:
    return Axis(mesh.get_local_rank(), mesh.size(), mesh.get_group())
