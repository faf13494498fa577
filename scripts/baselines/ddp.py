#!/usr/bin/env python
"""Data parallelism written by hand, as good as we can make it: DistributedDataParallel under torchrun.

    torchrun --standalone --nproc-per-node 2 scripts/baselines/ddp.py --layers 6 --hidden 512 --json ddp.json

This is the reference that the one line is measured against, so it uses what PyTorch offers: gradients as views of the
buckets, a static graph, the reduction overlapped with backward, the fused optimizer.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from bench_common import LLAMA, Clock, Report, build_model, count_parameters, make_batches, parse_arguments
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = parse_arguments(__doc__)
    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} is not divisible by {world_size} processes")

    model = build_model(args).to(device)
    report = Report("ddp", count_parameters(model))
    model = DistributedDataParallel(
        model,
        device_ids=[local_rank] if on_gpu else None,
        gradient_as_bucket_view=True,
        static_graph=args.model == LLAMA,
    )
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)

    clock = Clock(report)
    for batch in make_batches(args):
        input_ids = batch.chunk(world_size)[rank].to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.bf16):
            loss = model(input_ids, labels=input_ids)[0]
        loss.backward()
        optim.step()
        optim.zero_grad(set_to_none=True)
        global_loss = loss.detach()  # every slice has the same number of tokens
        dist.all_reduce(global_loss)
        clock.step_ended(global_loss / world_size)

    if rank == 0:
        report.write(args.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
