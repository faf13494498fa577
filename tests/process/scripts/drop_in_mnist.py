"""A small convolutional network on pictures with labels, in the way of the MNIST example: SGD, StepLR, F.nll_loss.

With --ap it has the one line; prints losses and accuracies.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.bn = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout = nn.Dropout(0.5)
        self.fc1 = nn.Linear(400, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.bn(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_loader.dataset)}]\tloss {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    test_loss /= len(test_loader.dataset)
    print(f"Test set: loss {test_loss:.6f}\naccuracy {correct / len(test_loader.dataset):.6f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ap", action="store_true")
    parser.add_argument("--log-interval", type=int, default=2)
    args = parser.parse_args()
    if args.ap:
        torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)
    use_accel = torch.accelerator.is_available()
    torch.manual_seed(1)
    device = torch.accelerator.current_accelerator() if use_accel else torch.device("cpu")
    pictures, labels = torch.randn(160, 1, 14, 14), torch.randint(0, 10, (160,))
    pictures += labels.view(-1, 1, 1, 1) / 5
    kwargs = {"num_workers": 1, "persistent_workers": True, "pin_memory": use_accel}
    train_loader = DataLoader(TensorDataset(pictures[:128], labels[:128]), 32, shuffle=True, **kwargs)
    test_loader = DataLoader(TensorDataset(pictures[128:], labels[128:]), 32, **kwargs)

    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 4):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    torch.save(model.state_dict(), "net-ap.pt" if args.ap else "net.pt")


if __name__ == "__main__":
    main()
