#!/usr/bin/env python
r"""Data parallelism: every device holds the whole model and works on its rows of the batch (DistributedDataParallel).

    torchrun --standalone --nproc-per-node 2 tutorials/manual/train_ddp.py --layers 6 --hidden 512 --json ddp.json

On several machines the same command starts on each; `--rdzv-endpoint` is the one where they meet. Twice one process,
with both on this machine:

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:29400 \
        tutorials/manual/train_ddp.py

It uses what PyTorch offers to make this fast: gradients as views of the buckets, a static graph, the reduction
overlapped with backward, the fused optimizer.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

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
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    # --8<-- [start:setup]
    parser = argument_parser(__doc__)
    add_model_flag(parser)
    args = parse_arguments(parser, torchrun=True, data_parallel=True)
    # torchrun starts this script once for each device and tells every copy, in the environment, which one it is.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    # --8<-- [end:setup]

    # Every process draws the same weights from the same seed. DDP sends those of rank 0 to all, to be sure.
    model = build_model(args).to(device)
    report = Report(count_parameters(model))
    # --8<-- [start:wrap]
    model = DistributedDataParallel(
        model,
        device_ids=[device.index] if on_gpu else None,
        gradient_as_bucket_view=True,  # no copy of the gradients beside the buckets they are summed in
        static_graph=args.model == LLAMA and args.micro_batches == 1,  # the same parameters take part in every step
    )
    # --8<-- [end:wrap]
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=args.epsilon, fused=True)

    clock = Clock(report, prints=rank == 0)
    for batch in make_batches(args):
        # --8<-- [start:rows]
        own_rows = batch.chunk(world_size)[rank].to(device, non_blocking=True)
        # --8<-- [end:rows]
        losses = []
        for number, input_ids in enumerate(own_rows.chunk(args.micro_batches), start=1):
            # Gradients of micro-batches add up here; only the last one's backward talks to the other processes.
            with nullcontext() if number == args.micro_batches else model.no_sync():
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.bf16):
                    loss = model(input_ids, labels=input_ids)[0] / args.micro_batches
                loss.backward()  # DDP takes the mean of the gradients over all processes
            losses.append(loss.detach())
        # DDP has left the same gradients on every device, so that each finds the norm of the whole by itself.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optim.step()
        optim.zero_grad(set_to_none=True)
        # Every process has the same number of tokens, so the mean of their means is the mean over the global batch.
        mean_loss = torch.stack(losses).sum() / world_size
        dist.all_reduce(mean_loss)
        clock.step_ended(mean_loss, norm)

    if rank == 0:
        report.write(args.json)
        save_weights(model.module.state_dict(), args.save)  # `model` itself would put "module." before every name
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
