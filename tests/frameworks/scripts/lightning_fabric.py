"""Trains a small convolutional network in a loop of one's own with Lightning Fabric, and saves and loads its state.

With --ap it has the one line; prints losses and an accuracy.
"""

import argparse

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ap", action="store_true", help="run with the one line")
options = parser.parse_args()
if options.ap:
    torch.moreh.option.enable_advanced_parallelization()

from lightning.fabric import Fabric, seed_everything  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.25)
        self.output = nn.Linear(8 * 5 * 5, 4)

    def forward(self, pictures):
        maps = F.max_pool2d(F.relu(self.norm(self.conv(pictures))), 2)
        return F.log_softmax(self.output(self.dropout(maps.flatten(1))), dim=1)


def main():
    seed_everything(3, verbose=False)
    fabric = Fabric(accelerator="auto", devices=1)
    fabric.launch()
    classes = torch.randint(0, 4, (128,))
    pictures = torch.randn(128, 1, 12, 12) + classes.view(-1, 1, 1, 1) / 4
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(pictures, classes), batch_size=32, shuffle=True))
    with fabric.init_module():
        model = Network()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    model, optimizer = fabric.setup(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(2):
        model.train()
        for number, (inputs, targets) in enumerate(loader):
            accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = F.nll_loss(model(inputs), targets)
                fabric.backward(loss / 2)
            if not accumulating:
                norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                print(f"norm {norm.item():.6f}")
            print(f"epoch {epoch}: loss {loss.item():.6f}")
        schedule.step()
    fabric.save("state.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
    remainder = fabric.load("state.ckpt", {"model": model, "optimizer": optimizer})
    model.eval()
    with torch.no_grad():
        outputs, targets = zip(*((model(inputs), targets) for inputs, targets in loader))
    outputs, targets = fabric.all_gather(torch.cat(outputs)), fabric.all_gather(torch.cat(targets))
    fabric.print(f"after epoch {remainder['epoch']}: held-out loss {F.nll_loss(outputs, targets).item():.6f}")
    fabric.print(f"accuracy {(outputs.argmax(1) == targets).float().mean().item():.6f}")


if __name__ == "__main__":
    main()
