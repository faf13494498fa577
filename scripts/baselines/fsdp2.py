#!/usr/bin/env python
"""Sharded data parallelism written by hand, as good as we can make it: `fully_shard` (FSDP2) under torchrun.

    torchrun --standalone --nproc-per-node 2 scripts/baselines/fsdp2.py --layers 6 --hidden 512 --json fsdp2.json

Each decoder layer is a unit, so that gathering the next one overlaps with computing this one; parameters, gradients
and optimizer state are split over all processes.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from bench_common import LLAMA, Clock, Report, build_model, count_parameters, make_batches, parse_arguments
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    args = parse_arguments(__doc__)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} is not divisible by {world_size} processes")

    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if args.bf16 else None, reduce_dtype=torch.float32)
    model = build_model(args)
    report = Report("fsdp2", count_parameters(model))
    if args.model == LLAMA:
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)

    clock = Clock(report)
    for batch in make_batches(args):
        input_ids = batch.chunk(world_size)[rank].to(device, non_blocking=True)
        loss = model(input_ids, labels=input_ids)[0]
        loss.backward()
        optim.step()
        optim.zero_grad(set_to_none=True)
        global_loss = loss.detach().float()  # every slice has the same number of tokens
        dist.all_reduce(global_loss)
        clock.step_ended(global_loss / world_size)

    if rank == 0:
        report.write(args.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
