#!/usr/bin/env python
"""The script for one device, with the one line: it trains on every device of the machine.

    python tutorials/manual/train_one_line.py --layers 6 --hidden 512 --plan replicate=2 --json one_line.json

`--plan` is there so that a run can be compared with one of the torchrun scripts; without it a plan is chosen.
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
    save_weights,
)


def main() -> None:
    parser = argument_parser(__doc__)
    add_model_flag(parser)
    parser.add_argument("--plan", help='parallel plan, such as "replicate=2" (default: chosen for you)')
    args = parse_arguments(parser)
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=args.bf16, plan=args.plan)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = build_model(args).to(device)
    report = Report(count_parameters(model))
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=args.epsilon, fused=True)

    clock = Clock(report, prints=True)
    for batch in make_batches(args):
        rows = batch.to(device, non_blocking=True)
        losses = []
        for input_ids in rows.chunk(args.micro_batches):  # gradients of micro-batches add up
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.bf16):
                loss = model(input_ids, labels=input_ids)[0] / args.micro_batches
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optim.step()
        optim.zero_grad(set_to_none=True)
        clock.step_ended(torch.stack(losses).sum(), norm)

    report.write(args.json)
    save_weights(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
