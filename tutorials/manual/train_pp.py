#!/usr/bin/env python
"""Pipeline parallelism: every device holds some of the layers, and micro-batches flow through them.

    torchrun --standalone --nproc-per-node 2 tutorials/manual/train_pp.py --micro-batches 4 --json pp.json

The model is cut as PyTorch's documentation shows it: each process builds the whole and deletes the layers that it does
not hold. `torch.distributed.pipelining` sends hidden states forward and gradients back, in the order of the schedule.
"""

from __future__ import annotations

import argparse
import os

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
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


class Stage(nn.Module):
    """Some layers of a Llama; the first stage has the embedding too, the last one the norm and the head."""

    def __init__(self, args: argparse.Namespace, layers: range) -> None:
        super().__init__()
        self.llama = build_model(args)
        self.num_whole_parameters = count_parameters(self.llama)
        self.first_layer = layers.start
        self.bf16 = args.bf16
        body = self.llama.model
        body.layers = nn.ModuleList(body.layers[layers.start : layers.stop])
        if layers.start > 0:
            body.embed_tokens = nn.Identity()  # what comes in are hidden states
        if layers.stop < args.layers:
            body.norm = self.llama.lm_head = nn.Identity()  # and go out again

    def forward(self, ids_or_hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits in the last stage, hidden states in the others."""
        with torch.autocast(ids_or_hidden.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            return self.llama(ids_or_hidden).logits


def name_in_model(name: str, first_layer: int) -> str:
    """Returns the name in the whole model of what a stage, whose layers are counted from 0, calls `name`."""
    name = name.removeprefix("llama.")
    if not name.startswith("model.layers."):
        return name
    model, layers, number, rest = name.split(".", maxsplit=3)
    return f"{model}.{layers}.{int(number) + first_layer}.{rest}"


def gather_state(own_state: dict[str, torch.Tensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor] | None:
    """Returns the state dicts of all stages as one, on the first device of the pipeline; None on the others."""
    own_state = {name: tensor.cpu() for name, tensor in own_state.items()}
    states = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(own_state, states, group=group, group_dst=0)
    return None if states is None else {name: tensor for state in states for name, tensor in state.items()}


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of each token from those before it, as transformers computes it."""
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)  # nothing follows the last token
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def add_pipeline_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what a pipeline can be told."""
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b")
    parser.add_argument("--stages-per-device", type=int, help="only interleaved: stages on each device (default: 2)")
    parser.add_argument("--split", help="layers of each stage, such as 2+4 (default: as even as can be)")


def layers_of_stages(parser: argparse.ArgumentParser, args: argparse.Namespace, num_devices: int) -> list[range]:
    """Returns which layers each stage holds: those of `--split`, or as even as can be."""
    num_stages = num_devices * ((args.stages_per_device or 2) if args.schedule == "interleaved" else 1)
    if args.split:
        counts = [int(count) for count in args.split.split("+")]
    else:
        counts = [args.layers // num_stages + (number < args.layers % num_stages) for number in range(num_stages)]
    if len(counts) != num_stages or sum(counts) != args.layers or min(counts) < 1:
        parser.error(f"{args.layers} layers in the stages {counts}; need {num_stages} stages of 1 or more layers")
    return [range(sum(counts[:number]), sum(counts[: number + 1])) for number in range(num_stages)]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.set_defaults(micro_batches=int(os.environ.get("WORLD_SIZE", 1)))
    add_pipeline_flags(parser)
    args = parse_arguments(parser, torchrun=True)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    layers = layers_of_stages(parser, args, num_devices=world_size)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)

    # Device r holds the stages r, r + world_size, ...: with several on each, a device waits less for the others.
    own_numbers = range(rank, len(layers), world_size)
    modules = [Stage(args, layers[number]).to(device) for number in own_numbers]
    stages = [PipelineStage(module, number, len(layers), device) for module, number in zip(modules, own_numbers)]
    report = Report(modules[0].num_whole_parameters)
    # The schedule divides the gradients by the number of micro-batches, since the loss of each is a mean.
    schedule = SCHEDULES[args.schedule](
        stages if args.schedule == "interleaved" else stages[0], args.micro_batches, loss_fn=next_token_loss
    )
    optim = torch.optim.AdamW(nn.ModuleList(modules).parameters(), lr=args.lr, eps=args.epsilon, fused=True)

    clock = Clock(report, prints=rank == 0)
    for batch in make_batches(args):
        rows = batch.to(device, non_blocking=True)
        losses: list[torch.Tensor] = []
        inputs = (rows,) if rank == 0 else ()
        targets = {"target": rows, "losses": losses} if rank == world_size - 1 else {}
        schedule.step(*inputs, **targets, return_outputs=False)  # forward and backward of all micro-batches
        # Each device squares the norm of its stages; the sum over the devices is that of the whole model.
        parameters = [parameter for module in modules for parameter in module.parameters()]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]).square()
        dist.all_reduce(norm)
        norm = norm.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, args.max_norm, norm)
        optim.step()
        optim.zero_grad(set_to_none=True)
        # Only the last device knows the loss; a sum tells it to all.
        mean_loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)
        dist.all_reduce(mean_loss)
        clock.step_ended(mean_loss, norm)

    if rank == 0:
        report.write(args.json)
    if args.save:
        own_state = {
            name_in_model(name, module.first_layer): tensor
            for module in modules
            for name, tensor in module.state_dict().items()
        }
        whole = gather_state(own_state, dist.group.WORLD)
        if rank == 0:
            save_weights(whole, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
