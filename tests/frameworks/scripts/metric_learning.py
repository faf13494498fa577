"""Learns embeddings with pytorch-metric-learning: a miner with a triplet loss, ArcFace, NT-Xent.

With --ap it has the one line; prints losses.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from pytorch_metric_learning import distances, losses, miners, reducers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES = 4


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    classes = torch.arange(64) % NUM_CLASSES
    pictures = torch.randn(64, 1, 10, 10) + classes.view(-1, 1, 1, 1) / 2
    loader = DataLoader(TensorDataset(pictures, classes), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 16)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    distance = distances.CosineSimilarity()
    triplets = losses.TripletMarginLoss(margin=0.2, distance=distance, reducer=reducers.ThresholdReducer(low=0))
    mine = miners.TripletMarginMiner(margin=0.2, distance=distance, type_of_triplets="semihard")
    for data, labels in loader:
        data, labels = data.to(device), labels.to(device)
        optimizer.zero_grad()
        embeddings = model(data)
        indices = mine(embeddings, labels)
        loss = triplets(embeddings, labels, indices)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.6f} mined triplets {mine.num_triplets}")

    margins = losses.ArcFaceLoss(NUM_CLASSES, 16).to(device)
    loss_optimizer = torch.optim.SGD(margins.parameters(), lr=0.01)
    for data, labels in loader:
        data, labels = data.to(device), labels.to(device)
        optimizer.zero_grad()
        loss_optimizer.zero_grad()
        loss = margins(model(data), labels)
        loss.backward()
        optimizer.step()
        loss_optimizer.step()
        print(f"loss {loss.item():.6f}")
    contrast = losses.NTXentLoss(temperature=0.1)
    print(f"held out: loss {contrast(model(pictures.to(device)), classes.to(device)).item():.6f}")


if __name__ == "__main__":
    main()
