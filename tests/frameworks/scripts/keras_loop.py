"""A Keras 3 model as a PyTorch module: a sequential model in a loop with PyTorch's optimizer, loss and loader.

With --ap it has the one line; prints losses.
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import keras
from keras import layers
from torch.utils.data import DataLoader, TensorDataset


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    keras.utils.set_random_seed(1)
    classes = torch.randint(0, 4, (64,))
    features = torch.randn(64, 10) + classes[:, None] / 2
    loader = DataLoader(TensorDataset(features, classes), batch_size=16)
    model = keras.Sequential(
        [layers.Input((10,)), layers.Dense(32, activation="relu"), layers.BatchNormalization(), layers.Dense(4)]
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = torch.nn.CrossEntropyLoss()
    for _ in range(2):
        for inputs, targets in loader:
            logits = model(inputs.to(device), training=True)
            loss = criterion(logits, targets.to(device))
            model.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.6f}")
    with torch.no_grad():
        logits = model(features.to(device), training=False)  # with the averages that the normalisation has kept
        print(f"held out: loss {criterion(logits, classes.to(device)).item():.6f}")


if __name__ == "__main__":
    main()
