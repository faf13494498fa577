#!/usr/bin/env python
"""The same training as a plain script for one device, with the one line.

    python tutorials/manual/train_one_line.py --layers 6 --hidden 512 --plan replicate=2 --json one_line.json

`--devices` and `--plan` are all that the torchrun scripts beside it do not have: they make a run comparable with one.
"""

from __future__ import annotations

import torch
from common import (
    Clock,
    Report,
    add_model_flag,
    argument_parser,
    build_model,
    count_parameters,
    make_batches,
    parse_arguments,
)


def main() -> None:
    parser = argument_parser(__doc__)
    add_model_flag(parser)
    parser.add_argument("--devices", type=int, help="devices to use (default: all)")
    parser.add_argument("--plan", help='parallel plan, such as "replicate=2" (default: chosen for you)')
    args = parse_arguments(parser)
    torch.moreh.option.enable_advanced_parallelization(
        num_micro_batches="auto" if args.plan else args.micro_batches,  # a plan says it itself
        mixed_precision=args.bf16,
        devices=args.devices,
        plan=args.plan,
    )

    model = build_model(args)
    report = Report("train_one_line", count_parameters(model))
    model.cuda()
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=args.epsilon, fused=True)

    clock = Clock(report, prints=True)
    for batch in make_batches(args):
        input_ids = batch.cuda()
        loss = model(input_ids, labels=input_ids)[0]
        loss.backward()
        optim.step()
        optim.zero_grad(set_to_none=True)
        clock.step_ended(loss)

    report.write(args.json)


if __name__ == "__main__":
    main()
