#!/usr/bin/env python
"""Sharded data parallelism: parameters, gradients and optimizer state are split over the devices (FSDP2).

    torchrun --standalone --nproc-per-node 2 tutorials/manual/train_fsdp.py --layers 6 --hidden 512 --json fsdp.json

Each decoder layer is a unit, so that gathering the next one overlaps with computing this one. `--replicate 2` makes the
plan hybrid: two groups of devices, each of which holds the whole model among its own devices.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from common import (
    LLAMA,
    Clock,
    Report,
    add_model_flag,
    argument_parser,
    build_model,
    count_parameters,
    make_batches,
    parse_arguments,
    save_weights,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    parser = argument_parser(__doc__)
    add_model_flag(parser)
    parser.add_argument("--replicate", type=int, default=1, help="groups that hold the whole model each")
    args = parse_arguments(parser, torchrun=True, data_parallel=True)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.replicate < 1 or world_size % args.replicate:
        parser.error(f"--replicate is {args.replicate}; it must divide the {world_size} processes")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)

    # A mesh of one axis: shard over it. Of two: copies along the first, shards along the second.
    shape, names = (world_size,), ("shard",)
    if args.replicate > 1:
        shape, names = (args.replicate, world_size // args.replicate), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if args.bf16 else None, reduce_dtype=torch.float32)

    # The whole model is in the memory of every process here, before each keeps its part. A model too large for that is
    # built on "meta" and filled, part by part, from a checkpoint.
    model = build_model(args)
    report = Report(count_parameters(model))
    if args.model == LLAMA:
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # last: it takes what no layer has taken, embedding and head
    # Only now, after the split: the optimizer steps on the parts.
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=args.epsilon, fused=True)

    clock = Clock(report, prints=rank == 0)
    for batch in make_batches(args):
        own_rows = batch.chunk(world_size)[rank].to(device, non_blocking=True)
        losses = []
        for number, input_ids in enumerate(own_rows.chunk(args.micro_batches), start=1):
            # Whole gradients of the earlier micro-batches add up here; the last one's backward sums and splits them.
            model.set_requires_gradient_sync(number == args.micro_batches)
            loss = model(input_ids, labels=input_ids)[0] / args.micro_batches
            loss.backward()  # FSDP takes the mean of the gradients over all processes
            losses.append(loss.detach())
        # A norm of parts: a DTensor, whose sum over the devices `full_tensor` takes.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm).full_tensor()
        optim.step()
        optim.zero_grad(set_to_none=True)
        # Every process has the same number of tokens, so the mean of their means is the mean over the global batch.
        mean_loss = torch.stack(losses).sum() / world_size
        dist.all_reduce(mean_loss)
        clock.step_ended(mean_loss, norm)

    if rank == 0:
        report.write(args.json)
    if args.save:  # every device gives its parts, and rank 0 alone gets the whole, in host memory
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        save_weights(whole, args.save if rank == 0 else None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
