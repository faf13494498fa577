"""Trains a small Llama under one plan after the other on the hosts of MOREH_HOSTS; without plans in this process alone.

usage: several_hosts.py RESULTS CHECKPOINT [PLAN... | load]
"""

import sys

import torch
from several_hosts_model import small_llama  # beside this script

import moreh_ap
from moreh_ap import device
from moreh_ap.plan import Plan

STEPS, ROWS, LENGTH = 4, 8, 16


def train(place):
    """Returns losses, model and optimizer."""
    torch.manual_seed(0)
    model = small_llama().to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randint(64, (ROWS, LENGTH), generator=generator).to(place))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, optimizer


def weights(model):
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def main(results, checkpoint, *plans):
    if not plans:
        losses, model, _ = train("cpu")
        torch.save({"": (losses, weights(model))}, results)
        return
    if plans == ("load",):
        torch.moreh.option.enable_advanced_parallelization(devices=2)
        model = small_llama().to("cuda")
        moreh_ap.load(checkpoint, model=model)
        model(torch.zeros(4, LENGTH, dtype=torch.long).to("cuda"))  # by the workers
        torch.save({"loaded": ([], weights(model))}, results)
        return
    torch.moreh.option.enable_advanced_parallelization(devices=4)
    train_on_hosts(results, checkpoint, *plans)


def train_on_hosts(results, checkpoint, *plans):
    """Trains under each plan, saves and loads; on workers that are there."""
    session, found = device.current().session, {}
    for plan in plans:
        with session.trying(Plan.parse(plan)):
            losses, model, optimizer = train("cuda")
        found[plan] = losses, weights(model)
        print("trained", plan, losses, flush=True)
    moreh_ap.save(checkpoint, model=model, optimizer=optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    moreh_ap.load(checkpoint, model=model, optimizer=optimizer)
    found["loaded"] = [], weights(model)
    torch.save(found, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
