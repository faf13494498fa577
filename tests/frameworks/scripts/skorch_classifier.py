"""A skorch classifier in a scikit-learn pipeline: fit with a validation split and callbacks, predict, grid search.

With --ap it has the one line; prints losses and accuracies.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import numpy as np
from sklearn.datasets import make_classification
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from skorch.callbacks import EpochScoring, LRScheduler
from torch import nn


class Net(nn.Module):
    """Returns class probabilities, as skorch's classifier expects them."""

    def __init__(self, num_units=16, dropout=0.3):
        super().__init__()
        self.dense = nn.Linear(20, num_units)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(num_units, 2)

    def forward(self, x):
        return torch.softmax(self.output(self.dropout(torch.relu(self.dense(x)))), dim=-1)


def main():
    torch.manual_seed(1)
    x, y = make_classification(128, 20, n_informative=10, random_state=0)
    x, y = x.astype(np.float32), y.astype(np.int64)
    net = NeuralNetClassifier(
        Net,
        max_epochs=4,
        lr=0.1,
        batch_size=32,
        iterator_train__shuffle=True,
        device="cuda" if torch.cuda.is_available() else "cpu",
        callbacks=[LRScheduler("StepLR", step_size=2), EpochScoring("roc_auc", lower_is_better=False)],
        verbose=0,
    )
    pipe = Pipeline([("scale", StandardScaler()), ("net", net)])
    pipe.fit(x, y)
    for row in pipe["net"].history:
        print(f"loss {row['train_loss']:.6f} valid loss {row['valid_loss']:.6f} accuracy {row['valid_acc']:.6f}")
    print(f"score {pipe.score(x, y):.6f} probability {pipe.predict_proba(x)[:, 1].mean():.6f}")
    net.set_params(train_split=False)
    search = GridSearchCV(net, {"lr": [0.05, 0.1], "module__num_units": [8]}, refit=False, cv=2, scoring="accuracy")
    search.fit(x, y)
    print(f"best score {search.best_score_:.6f} lr {search.best_params_['lr']:.6f}")


if __name__ == "__main__":
    main()
