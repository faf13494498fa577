#!/usr/bin/env python
"""Sharded data parallelism with DeepSpeed (ZeRO): gradients and optimizer state are split over the devices.

    pip install deepspeed
    torchrun --standalone --nproc-per-node 2 tutorials/manual/train_deepspeed.py --layers 6 --hidden 512 --json ds.json

Its engine takes the place of model, optimizer, accumulation and clipping. What does not depend on a run stands in
`ds_config.json`; the sizes of a batch and the norm are added here, so that they cannot differ from the flags.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from common import (
    Clock,
    Report,
    argument_parser,
    build_model,
    count_parameters,
    make_batches,
    parse_arguments,
    save_weights,
)

CONFIG = Path(__file__).with_name("ds_config.json")


def main() -> None:
    parser = argument_parser(__doc__)
    args = parse_arguments(parser, torchrun=True, data_parallel=True)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False)

    config = json.loads(CONFIG.read_text()) | {
        "train_batch_size": args.batch_size,
        "train_micro_batch_size_per_gpu": args.batch_size // (world_size * args.micro_batches),
        "gradient_accumulation_steps": args.micro_batches,
        "gradient_clipping": args.max_norm,
        "torch_autocast": {"enabled": args.bf16, "dtype": "bfloat16"},
    }
    model = build_model(args).to(device)
    report = Report(count_parameters(model))
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=args.epsilon, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optim, config=config)

    clock = Clock(report, prints=rank == 0)
    for batch in make_batches(args):
        own_rows = batch.chunk(world_size)[rank].to(device, non_blocking=True)
        losses = []
        for input_ids in own_rows.chunk(args.micro_batches):
            loss = engine(input_ids, labels=input_ids)[0]
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        mean_loss = torch.stack(losses).mean()
        dist.all_reduce(mean_loss)
        clock.step_ended(mean_loss / world_size, torch.as_tensor(engine.get_global_grad_norm()))

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):  # whole again, on every device
        if rank == 0:
            report.write(args.json)
            save_weights(engine.module.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
