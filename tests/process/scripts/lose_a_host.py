"""Trains on two hosts with two devices each until one is lost, and then as often in one process; prints how far they
are apart.

lose_a_host.py PLAN    # under which four workers train; those that are left get the best one for them

A host of CPU workers can have any number of them. Here each has room for two, as one with two GPUs.
"""

import dataclasses
import sys

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moreh_ap import device
from moreh_ap.runtime.recovery import hosts_in_use, snapshot_timing

STEPS, AT = 8, 4


def build():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, use_cache=False)  # fmt: skip
    return LlamaForCausalLM(config)


def let_the_plan_go():
    """Has the plan be one that the planner has chosen."""
    planned = device.current().session.outbox.on_error.__self__._taking_over.planned
    for remote, chosen in list(planned.items()):
        planned[remote] = dataclasses.replace(chosen, is_given=False)


def kill_agent(rank):
    """Kills the agent of a worker's host, and with it all of its workers."""
    parents = psutil.Process(device.current().session.workers.pids[rank]).parents()
    next(one for one in parents if "moreh_ap.runtime.host.remote_agent" in one.cmdline()).kill()


def train(place):
    """Returns losses, norms and weights."""
    model, generator, found = build().to(place), torch.Generator().manual_seed(1), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        for half in range(2):
            ids = torch.randint(0, 64, (8, 12), generator=generator).to(place)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / 2).backward()
            if place == "cuda" and (step, half) == (AT, 0):
                let_the_plan_go()
                kill_agent(3)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), norm.item()]
    return [torch.tensor(found), *(parameter.detach().cpu() for parameter in model.parameters())]


def main():
    snapshot_timing.STEPS, hosts_in_use.most_on = 1, lambda host, device_type: 2
    torch.moreh.option.enable_advanced_parallelization(plan=sys.argv[1])
    found, expected = train("cuda"), train("cpu")
    apart = [float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, expected, strict=True)]
    print(f"{device.current().session.num_devices} workers, largest difference {max(apart):.2g}", flush=True)


if __name__ == "__main__":
    main()
