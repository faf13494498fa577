"""Classifies small graphs with PyTorch Geometric: message passing over batches of its loader, pooled to a row a graph.

With --ap it has the one line; prints losses and the accuracy.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, GINConv, global_mean_pool
from torch_geometric.utils import to_undirected

NUM_FEATURES, NUM_CLASSES = 6, 3


def graphs(count):
    made = []
    for number in range(count):
        nodes, label = 5 + number % 4, number % NUM_CLASSES
        ring = torch.arange(nodes)
        chords = torch.randint(0, nodes, (2, 2 + label))
        edges = to_undirected(torch.cat([torch.stack([ring, (ring + 1) % nodes]), chords], dim=1))
        made.append(Data(x=torch.randn(nodes, NUM_FEATURES) + label / 2, edge_index=edges, y=torch.tensor([label])))
    return made


class GraphClassifier(torch.nn.Module):
    """Returns class scores of shape (graphs, classes)."""

    def __init__(self, hidden=32):
        super().__init__()
        self.first = GCNConv(NUM_FEATURES, hidden)
        mlp = torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden))
        self.second = GINConv(mlp)
        self.head = torch.nn.Linear(hidden, NUM_CLASSES)

    def forward(self, data):
        x = self.first(data.x, data.edge_index).relu()
        x = self.second(x, data.edge_index).relu()
        x = global_mean_pool(x, data.batch)
        x = torch.nn.functional.dropout(x, p=0.2, training=self.training)
        return self.head(x)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    training, held_out = graphs(32), graphs(16)
    model = GraphClassifier().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    criterion = torch.nn.CrossEntropyLoss()
    for _ in range(3):
        model.train()
        for data in DataLoader(training, batch_size=8, shuffle=True):
            data = data.to(device)
            optimizer.zero_grad()
            loss = criterion(model(data), data.y)
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.6f}")
    model.eval()
    with torch.no_grad():
        correct = sum(
            int((model(data.to(device)).argmax(dim=1) == data.y.to(device)).sum()) for data in DataLoader(held_out, 8)
        )
    print(f"accuracy {correct / len(held_out):.6f}")


if __name__ == "__main__":
    main()
