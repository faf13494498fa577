#!/usr/bin/env python
"""The same training as a plain script for one device, with the one line.

    python scripts/baselines/one_line.py --layers 6 --hidden 512 --plan replicate=2 --json one_line.json

`--devices` and `--plan` are all that the torchrun scripts beside it do not have: they make a run comparable with one.
"""

from __future__ import annotations

import torch
from bench_common import Clock, Report, build_model, count_parameters, make_batches, parse_arguments


def main() -> None:
    args = parse_arguments(__doc__, one_line=True)
    torch.moreh.option.enable_advanced_parallelization(devices=args.devices, plan=args.plan, mixed_precision=args.bf16)

    model = build_model(args)
    report = Report("one_line", count_parameters(model))
    model.cuda()
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)

    clock = Clock(report)
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
