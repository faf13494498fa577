"""Classifies graphs with a graph isomorphism network of PyTorch Geometric, as its examples do: layers and pooling are
given tensors and the number of graphs, and layers normalise nodes over the batch.

With --ap it has the one line; prints losses and the accuracy.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, GINConv, global_add_pool

NUM_FEATURES, NUM_CLASSES = 7, 2


def graphs(count):
    made = []
    for number in range(count):
        nodes = 6 + number % 5
        edges = torch.randint(0, nodes, (2, 3 * nodes))
        made.append(Data(x=torch.randn(nodes, NUM_FEATURES), edge_index=edges, y=torch.tensor([number % NUM_CLASSES])))
    return made


class GIN(torch.nn.Module):
    """Returns class scores of shape (graphs, classes)."""

    def __init__(self, in_channels, hidden_channels, out_channels, num_layers):
        super().__init__()
        self.convs = torch.nn.ModuleList()
        for _ in range(num_layers):
            self.convs.append(GINConv(MLP([in_channels, hidden_channels, hidden_channels])))
            in_channels = hidden_channels
        self.mlp = MLP([hidden_channels, hidden_channels, out_channels], norm=None, dropout=0.5)

    def forward(self, x, edge_index, batch, batch_size):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        x = global_add_pool(x, batch, size=batch_size)
        return self.mlp(x)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    training, held_out = graphs(32), graphs(16)
    model = GIN(NUM_FEATURES, 16, NUM_CLASSES, num_layers=3).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        model.train()
        for data in DataLoader(training, batch_size=8, shuffle=True):
            data = data.to(device)
            optimizer.zero_grad()
            out = model(data.x, data.edge_index, data.batch, data.batch_size)
            loss = F.cross_entropy(out, data.y)
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.6f}")
    model.eval()
    correct = 0
    for data in DataLoader(held_out, batch_size=8):
        data = data.to(device)
        with torch.no_grad():
            pred = model(data.x, data.edge_index, data.batch, data.batch_size).argmax(dim=-1)
        correct += int((pred == data.y).sum())
    print(f"accuracy {correct / len(held_out):.6f}")


if __name__ == "__main__":
    main()
