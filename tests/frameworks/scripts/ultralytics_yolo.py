"""Trains a tiny YOLO of ultralytics from a configuration of its own on made-up pictures, and predicts.

With --ap it has the one line; prints losses and what is detected.
"""

import argparse
from pathlib import Path

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ap", action="store_true", help="run with the one line")
options = parser.parse_args()
if options.ap:
    torch.moreh.option.enable_advanced_parallelization()

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402
from ultralytics import YOLO  # noqa: E402
from ultralytics.utils import LOGGER  # noqa: E402

MODEL = """
nc: 2
backbone:
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, C2f, [16, True]]
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, Conv, [32, 3, 2]]
  - [-1, 1, SPPF, [32, 5]]
head:
  - [-1, 1, nn.Upsample, [None, 2, nearest]]
  - [[-1, 3], 1, Concat, [1]]
  - [-1, 1, C2f, [16]]
  - [[8, 5], 1, Detect, [nc]]
"""


def made_up_data(folder):
    """Writes pictures with one bright box each, and says where they are; returns the name of that file."""
    draws = np.random.default_rng(4)
    for part, number in (("train", 16), ("val", 8)):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True, exist_ok=True)
        for index in range(number):
            picture = draws.integers(0, 80, (64, 64, 3), dtype=np.uint8)
            left, top, side = draws.integers(4, 36), draws.integers(4, 36), draws.integers(14, 24)
            kind = index % 2
            picture[top : top + side, left : left + side, kind] = 250
            Image.fromarray(picture).save(folder / "images" / part / f"{index}.png")
            box = (left + side / 2) / 64, (top + side / 2) / 64, side / 64, side / 64
            (folder / "labels" / part / f"{index}.txt").write_text(" ".join(map(str, (kind, *box))) + "\n")
    data = folder / "data.yaml"
    data.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [red, green]\n")
    return str(data)


def print_losses(trainer):
    parts = " ".join(f"{value:.6f}" for value in trainer.loss_items.values())
    print(f"loss {trainer.loss.item():.6f} parts {parts}")


def main():
    folder = Path.cwd() / ("ap" if options.ap else "reference")
    data = made_up_data(folder)
    (folder / "tiny.yaml").write_text(MODEL)
    LOGGER.setLevel("ERROR")
    torch.manual_seed(0)
    model = YOLO(str(folder / "tiny.yaml"))
    model.add_callback("on_train_batch_end", print_losses)
    settings = {"data": data, "imgsz": 64, "batch": 8, "project": str(folder), "name": "run", "workers": 0}
    settings |= {"plots": False, "verbose": False}
    model.train(epochs=2, optimizer="SGD", lr0=0.01, amp=False, seed=3, deterministic=True, **settings)
    metrics = model.val(**settings)
    print(f"mAP50 {metrics.box.map50:.6f}")
    (found,) = model.predict(str(folder / "images" / "val" / "0.png"), imgsz=64, conf=0.001, verbose=False)
    print(f"found {len(found.boxes)}, score {float(found.boxes.conf.sum()):.6f}")


if __name__ == "__main__":
    main()
