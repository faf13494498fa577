"""Fine-tunes a ResNet on made-up pictures with fastai: item and batch transforms, frozen layers, saved weights.

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
from fastai.vision.all import (  # noqa: E402
    Callback,
    CategoryBlock,
    DataBlock,
    ImageBlock,
    IndexSplitter,
    Normalize,
    PILImage,
    Resize,
    accuracy,
    aug_transforms,
    imagenet_stats,
    resnet18,
    set_seed,
    vision_learner,
)


def made_up_picture(number):
    """Returns a picture of noise: bright for odd numbers."""
    draws = np.random.default_rng(number)
    return PILImage.create(draws.integers(0, 128, (40, 40, 3), dtype=np.uint8) + np.uint8(number % 2 * 100))


class PrintLosses(Callback):
    def after_batch(self):
        if self.training:
            print(f"loss {self.learn.loss.item():.6f}")


def main():
    set_seed(9, reproducible=True)
    block = DataBlock(
        blocks=(ImageBlock, CategoryBlock),
        get_x=made_up_picture,
        get_y=lambda number: ("dark", "bright")[number % 2],
        splitter=IndexSplitter(list(range(48, 64))),
        item_tfms=Resize(32),
        batch_tfms=[*aug_transforms(size=32), Normalize.from_stats(*imagenet_stats)],
    )
    loaders = block.dataloaders(list(range(64)), bs=16, num_workers=0)
    learn = vision_learner(loaders, resnet18, pretrained=False, metrics=accuracy, cbs=PrintLosses())
    with learn.no_bar(), learn.no_logging():
        learn.fine_tune(1, 1e-3)
        print("validation loss {:.6f}, accuracy {:.6f}".format(*learn.validate()))
        learn.save("pictures")
        learn.load("pictures")
        probabilities, _ = learn.get_preds()
        print(f"mean probability {probabilities[:, 0].mean():.6f}")
        _, number, _ = learn.predict(made_up_picture(3))
        print(f"predicted {int(number)}")


if __name__ == "__main__":
    main()
