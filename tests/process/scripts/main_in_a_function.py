"""A script with everything in a guarded `main`, whose loader starts its processes by spawning."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CREATED = torch.ones(1).device  # what a module does on import happens in spawned processes too


class Points(Dataset):
    def __init__(self):
        self.x = torch.linspace(-1, 1, 48).reshape(12, 4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x).squeeze(1)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--ap", type=int, help="with the one line on so many devices")
    devices = args.parse_args().ap
    if devices:
        for _ in range(2):  # a line in a cell, or in a function, is easily run twice
            torch.moreh.option.enable_advanced_parallelization(devices=devices, mixed_precision=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Points(), batch_size=5, num_workers=1, multiprocessing_context="spawn")
    for x, y in loader:
        loss = F.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
