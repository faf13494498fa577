"""Classifies small pictures with convolutions: SGD with momentum, a stepwise schedule, loaders with worker processes.

With --ap it has the one line; prints losses and accuracies.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

SIDE, NUM_CLASSES = 14, 10
NUM_TRAINING, NUM_HELD_OUT, BATCH_SIZE = 128, 32, 32


class PictureClassifier(nn.Module):
    """Returns log-probabilities of shape (pictures, classes)."""

    def __init__(self, channels=8, features=32):
        super().__init__()
        pooled_side = (SIDE - 2 - 2) // 2
        self.output = nn.Linear(features, NUM_CLASSES)
        self.hidden = nn.Linear(2 * channels * pooled_side**2, features)
        self.first_conv = nn.Conv2d(1, channels, kernel_size=3)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second_conv = nn.Conv2d(channels, 2 * channels, kernel_size=3)
        self.dropout = nn.Dropout(p=0.5)

    def forward(self, pictures):
        maps = F.relu(self.first_norm(self.first_conv(pictures)))
        maps = F.max_pool2d(F.relu(self.second_conv(maps)), kernel_size=2)
        features = F.relu(self.hidden(self.dropout(torch.flatten(maps, start_dim=1))))
        return F.log_softmax(self.output(features), dim=1)


def on_device(loader, device):
    for pictures, classes in loader:
        yield pictures.to(device), classes.to(device)


def train_one_epoch(model, loader, optimizer, device):
    """Yields for each batch how many pictures came before it, and a function that reads its loss."""
    num_seen = 0
    model.train()
    for pictures, classes in on_device(loader, device):
        optimizer.zero_grad()
        loss = F.nll_loss(model(pictures), classes)
        loss.backward()
        optimizer.step()
        yield num_seen, loss.item
        num_seen += len(pictures)


def evaluate(model, loader, device):
    """Returns the mean loss and the accuracy."""
    loss_sum, num_correct = 0.0, 0
    model.eval()
    with torch.no_grad():
        for pictures, classes in on_device(loader, device):
            log_probs = model(pictures)
            predicted = log_probs.argmax(dim=1, keepdim=True)
            num_correct += predicted.eq(classes.view_as(predicted)).sum().item()
            loss_sum += F.nll_loss(log_probs, classes, reduction="sum").item()
    num_pictures = len(loader.dataset)
    return loss_sum / num_pictures, num_correct / num_pictures


def made_up_pictures():
    """Returns data sets for training and evaluation: noise whose mean grows with the number of its class."""
    classes = torch.randint(0, NUM_CLASSES, (NUM_TRAINING + NUM_HELD_OUT,))
    pictures = torch.randn(len(classes), 1, SIDE, SIDE)
    pictures += classes.view(-1, 1, 1, 1) / 5
    whole = TensorDataset(pictures, classes)
    return TensorDataset(*whole[:NUM_TRAINING]), TensorDataset(*whole[NUM_TRAINING:])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log-every", type=int, default=2, help="batches from one printed loss to the next")
    parser.add_argument("--ap", action="store_true", help="run with the one line")
    options = parser.parse_args()
    if options.ap:
        torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

    has_accelerator = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if has_accelerator else torch.device("cpu")
    torch.manual_seed(7)
    training, held_out = made_up_pictures()
    loading = {"num_workers": 1, "persistent_workers": True, "pin_memory": has_accelerator}
    training_batches = DataLoader(training, batch_size=BATCH_SIZE, shuffle=True, **loading)
    held_out_batches = DataLoader(held_out, batch_size=BATCH_SIZE, **loading)

    model = PictureClassifier().to(device)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.05)
    schedule = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in ("first", "second", "third"):
        steps = train_one_epoch(model, training_batches, optimizer, device)
        for number, (num_seen, read_loss) in enumerate(steps):
            if number % options.log_every == 0:
                print(f"{epoch} epoch, after {num_seen} of {len(training)} pictures: loss {read_loss():.6f}")
        mean_loss, accuracy = evaluate(model, held_out_batches, device)
        schedule.step()
        print(f"held out: loss {mean_loss:.6f}\naccuracy {accuracy:.6f}")
    torch.save(model.state_dict(), f"classifier{'-ap' if options.ap else ''}.pt")


if __name__ == "__main__":
    main()
