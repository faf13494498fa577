#!/usr/bin/env python
"""Three kinds of parallelism at once: a pipeline of stages, each sharded (FSDP2) and split by tensor parallelism.

    torchrun --standalone --nproc-per-node 8 tutorials/manual/train_3d.py --pipeline 2 --tensor 2 --json 3d.json

The devices form one mesh with the axes pipeline, replicate, shard and tensor. Neighbours on the tensor axis talk most;
it varies fastest, so that they are on one machine. What no flag asks for becomes the shard axis. How a Llama is cut
into stages is explained in `train_pp.py`, how its products are split in `train_tp.py`.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import Clock, Report, argument_parser, check_batch, make_batches, parse_arguments, save_weights
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from train_pp import (
    SCHEDULES,
    Stage,
    add_pipeline_flags,
    gather_state,
    layers_of_stages,
    name_in_model,
    next_token_loss,
)
from train_tp import apply_tensor_parallel, check_divisible, clip_grad_norm, parameter_groups, whole_state

AXES = ("pipeline", "replicate", "shard", "tensor")


def loss_of_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss as an ordinary tensor, also from logits that are split by vocabulary."""
    loss = next_token_loss(logits, labels)
    return loss.to_local() if isinstance(loss, DTensor) else loss


def apply_parallelism(stage: Stage, mesh: DeviceMesh, bf16: bool) -> None:
    """Splits one stage: first the products, then what is left on each device, a layer at a time."""
    if mesh["tensor"].size() > 1:
        apply_tensor_parallel(stage.llama, mesh["tensor"])
    data_mesh = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    if data_mesh.size() == 1 and not bf16:
        return  # nothing to share, and nothing to cast
    # Every micro-batch needs all layers of the stage again: they stay gathered until the step is over.
    stage.bf16 = False  # FSDP casts, in place of autocast
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    for layer in stage.llama.model.layers:
        fully_shard(layer, mesh=data_mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(stage, mesh=data_mesh, mp_policy=policy, reshard_after_forward=False)


def main() -> None:
    parser = argument_parser(__doc__)
    for axis, default in (("pipeline", 2), ("replicate", 1), ("tensor", 2)):
        parser.add_argument(f"--{axis}", type=int, default=default, help=f"devices along the {axis} axis")
    parser.set_defaults(micro_batches=2)
    add_pipeline_flags(parser)
    args = parse_arguments(parser, torchrun=True)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shard, rest = divmod(world_size, args.pipeline * args.replicate * args.tensor)
    if rest or not shard:
        parser.error(f"{world_size} processes are not a multiple of --pipeline x --replicate x --tensor")
    data_parallel = args.replicate * shard
    check_batch(parser, args, data_parallel)
    check_divisible(parser, args, args.tensor)
    layers = layers_of_stages(parser, args, num_devices=args.pipeline)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    mesh = init_device_mesh(device.type, (args.pipeline, args.replicate, shard, args.tensor), mesh_dim_names=AXES)
    position = {axis: mesh.get_local_rank(axis) for axis in AXES}

    own_numbers = range(position["pipeline"], len(layers), args.pipeline)
    modules = [Stage(args, layers[number]).to(device) for number in own_numbers]
    report = Report(modules[0].num_whole_parameters)
    for module in modules:
        apply_parallelism(module, mesh, args.bf16)

    # Each pipeline is a group of its own: the devices with the same place on all other axes.
    group = mesh.get_group("pipeline")
    stages = [
        PipelineStage(module, number, len(layers), device, group=group) for module, number in zip(modules, own_numbers)
    ]

    # The schedule divides gradients by the number of micro-batches, FSDP by the number of slices of the batch. The
    # tensor axis divides by nothing: its devices work on the same rows.
    schedule = SCHEDULES[args.schedule](
        stages if args.schedule == "interleaved" else stages[0], args.micro_batches, loss_fn=loss_of_logits
    )
    model = nn.ModuleList(modules)
    optim = torch.optim.AdamW(parameter_groups(model), lr=args.lr, eps=args.epsilon, fused=True)

    clock = Clock(report, prints=rank == 0)
    for batch in make_batches(args):
        own_slice = position["replicate"] * shard + position["shard"]
        rows = batch.chunk(data_parallel)[own_slice].to(device, non_blocking=True)
        losses: list[torch.Tensor] = []
        inputs = (rows,) if position["pipeline"] == 0 else ()
        targets = {"target": rows, "losses": losses} if position["pipeline"] == args.pipeline - 1 else {}
        with loss_parallel() if args.tensor > 1 else nullcontext():  # around forward and backward
            schedule.step(*inputs, **targets, return_outputs=False)
        norm = clip_grad_norm(model, args.max_norm, pipeline=group)
        optim.step()
        optim.zero_grad(set_to_none=True)
        # The last devices of the pipelines know the loss of their slice, as often as the tensor axis is long.
        mean_loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)
        dist.all_reduce(mean_loss)
        clock.step_ended(mean_loss / (data_parallel * args.tensor), norm)

    if rank == 0:
        report.write(args.json)
    if args.save:  # each device puts its stages together, then one pipeline gathers the stages
        own_state = {
            name_in_model(name, module.first_layer): tensor
            for module in modules
            for name, tensor in whole_state(module).items()
        }
        if all(place == 0 for axis, place in position.items() if axis != "pipeline"):
            whole = gather_state(own_state, group)
            if rank == 0:
                save_weights(whole, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
