"""Trains on the hosts of MOREH_HOSTS, with one worker on each and then two, and prints the messages of 20 steps. Then
it goes on as `several_hosts.py`.

usage: several_hosts_messages.py RESULTS CHECKPOINT PLAN...; two hosts.
"""

import sys
import time

import several_hosts
import torch

from moreh_ap import device
from moreh_ap.plan import Plan


class Net(torch.nn.Linear):
    def forward(self, batch):
        return super().forward(batch).square().mean()


def counts_of(workers):
    """Returns them once nothing is on its way: what is no longer used is given back by a thread of its own."""
    found = None
    while True:
        workers.drain()
        links = workers._carrier
        counts = (workers._last_number, links.num_sent, links.num_received)
        if counts == found:
            return counts
        found = counts
        time.sleep(0.5)


def train():
    model = Net(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    workers = device.current().session.workers

    def step(reads):
        loss = model(torch.ones(8, 8).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item() if reads else loss

    step(True)
    before = counts_of(workers)
    for number in range(20):
        step(number % 2 == 0)
    after = counts_of(workers)
    print("workers", workers.num_workers, "messages", *(b - a for a, b in zip(before, after)), flush=True)


for num_workers in (2, 4):
    device.disable()
    torch.moreh.option.enable_advanced_parallelization(devices=num_workers)
    with device.current().session.trying(Plan.parse(f"replicate={num_workers}")):
        train()
several_hosts.train_on_hosts(*sys.argv[1:])
