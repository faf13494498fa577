"""Trains on the hosts of MOREH_HOSTS, with one worker on each and then two, and prints the messages of 20 steps.

usage: several_hosts_messages.py; two hosts.
"""

import torch

from moreh_ap import device


class Net(torch.nn.Linear):
    def forward(self, batch):
        return super().forward(batch).square().mean()


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
    workers.drain()
    links = workers._carrier
    before = (workers._last_number, links.num_sent, links.num_received)
    for number in range(20):
        step(number % 2 == 0)
    workers.drain()
    after = (workers._last_number, links.num_sent, links.num_received)
    print("workers", workers.num_workers, "messages", *(b - a for a, b in zip(before, after)), flush=True)


for num_workers in (2, 4):
    torch.moreh.option.enable_advanced_parallelization(plan=f"replicate={num_workers}")
    train()
    device.disable()
