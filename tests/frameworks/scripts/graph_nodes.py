"""Classifies the nodes of one graph with PyTorch Geometric: `model(data)`, masks for training and test nodes.

With --ap it has the one line; prints losses and the accuracy.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv

NUM_NODES, NUM_FEATURES, NUM_CLASSES = 60, 8, 4


class NodeClassifier(torch.nn.Module):
    """Returns log-probabilities of shape (nodes, classes)."""

    def __init__(self):
        super().__init__()
        self.first = GCNConv(NUM_FEATURES, 16)
        self.second = GATConv(16, 16, heads=2, concat=False)
        self.last = GCNConv(16, NUM_CLASSES)

    def forward(self, data):
        x, edge_index = data.x, data.edge_index
        x = F.relu(self.first(x, edge_index))
        x = F.dropout(x, training=self.training)
        x = F.elu(self.second(x, edge_index))
        return F.log_softmax(self.last(x, edge_index), dim=1)


def citations():
    classes = torch.arange(NUM_NODES) % NUM_CLASSES
    near = torch.rand(NUM_NODES, NUM_NODES) < torch.where(classes[:, None] == classes[None], 0.2, 0.03)
    data = Data(x=torch.randn(NUM_NODES, NUM_FEATURES) + classes[:, None] / 3, edge_index=near.nonzero().t(), y=classes)
    data.train_mask = torch.arange(NUM_NODES) < 40
    data.test_mask = ~data.train_mask
    return data


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    data, model = citations().to(device), NodeClassifier().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    model.train()
    for _ in range(8):
        optimizer.zero_grad()
        out = model(data)
        loss = F.nll_loss(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.6f}")
    model.eval()
    pred = model(data).argmax(dim=1)
    correct = (pred[data.test_mask] == data.y[data.test_mask]).sum()
    print(f"accuracy {int(correct) / int(data.test_mask.sum()):.6f}")


if __name__ == "__main__":
    main()
