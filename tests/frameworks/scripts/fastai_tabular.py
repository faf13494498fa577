"""Learns from a table with fastai: categories, numbers, missing values, one cycle of learning rates.

With --ap it has the one line; prints losses and an accuracy.
"""

import argparse

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ap", action="store_true", help="run with the one line")
options = parser.parse_args()
if options.ap:
    torch.moreh.option.enable_advanced_parallelization()

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
from fastai.tabular.all import (  # noqa: E402
    Callback,
    Categorify,
    CategoryBlock,
    FillMissing,
    Normalize,
    TabularDataLoaders,
    accuracy,
    set_seed,
    tabular_learner,
)


def made_up_table(rows=256):
    """Returns a table whose salary follows from age and work."""
    draws = np.random.default_rng(5)
    table = pd.DataFrame(
        {
            "age": draws.normal(40, 10, rows),
            "hours": draws.normal(38, 6, rows),
            "work": draws.choice(["office", "field", "none"], rows),
            "town": draws.choice(["north", "south"], rows),
        }
    )
    table["salary"] = np.where(table.age + 10 * (table.work == "office") > 44, ">=50k", "<50k")
    table.loc[::17, "age"] = np.nan
    return table


class PrintLosses(Callback):
    def after_batch(self):
        if self.training:
            print(f"loss {self.learn.loss.item():.6f}")


def main():
    set_seed(9, reproducible=True)
    loaders = TabularDataLoaders.from_df(
        made_up_table(),
        procs=[Categorify, FillMissing, Normalize],
        cat_names=["work", "town"],
        cont_names=["age", "hours"],
        y_names="salary",
        y_block=CategoryBlock(),
        valid_idx=list(range(192, 256)),
        bs=32,
    )
    learn = tabular_learner(loaders, layers=[32, 16], metrics=accuracy, cbs=PrintLosses())
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(2, 1e-2)
        print("validation loss {:.6f}, accuracy {:.6f}".format(*learn.validate()))
        learn.save("table")
        learn.load("table")
        probabilities, _ = learn.get_preds()
    print(f"mean probability {probabilities[:, 0].mean():.6f}")


if __name__ == "__main__":
    main()
