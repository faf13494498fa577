"""Sends the hosts of MOREH_HOSTS large batches and prints what that took on the network, a value a line; then it trains
until it is ended.

usage: several_hosts_bytes.py; within a network namespace with `eth0`.
"""

import threading
from pathlib import Path

import torch

torch.moreh.option.enable_advanced_parallelization(plan="replicate=4")
ROWS, WIDTH = 512, 1 << 14  # 32 MiB of float32
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


class Net(torch.nn.Linear):
    def forward(self, batch):
        return super().forward(batch).square().mean()


torch.manual_seed(0)
model = Net(WIDTH, 1)
alone = Net(WIDTH, 1)
alone.load_state_dict(model.state_dict())
model = model.cuda()
batches = [torch.randn(ROWS, WIDTH) for _ in range(3)]
model(torch.ones(4, WIDTH).cuda()).item()  # what the first call takes is over
for batch in batches:
    before = int(SENT.read_text())
    loss = model(batch.cuda()).item()
    print("sent", int(SENT.read_text()) - before, "of", batch.nbytes)
    assert abs(loss - alone(batch).item()) < 1e-5 * loss, (loss, alone(batch).item())

found = {}


def of_a_thread(index, batch):
    found[index] = [model(batch.cuda() * 1).detach() for _ in range(4)]


threads = [threading.Thread(target=of_a_thread, args=(i, batch[:256])) for i, batch in enumerate(batches)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for index, losses in found.items():
    for loss in losses:
        assert abs(loss.item() - alone(batches[index][:256]).item()) < 1e-5 * loss.item(), index
print("done", flush=True)
while True:
    model(torch.ones(4, WIDTH).cuda()).backward()
    model.zero_grad()
