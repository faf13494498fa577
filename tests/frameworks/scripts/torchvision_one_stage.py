"""Trains torchvision's FCOS and SSD with tiny backbones: lists of unequal pictures and of targets.

With --ap it has the one line; prints losses and what is detected.
"""

import argparse

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ap", action="store_true", help="run with the one line")
options = parser.parse_args()
if options.ap:
    torch.moreh.option.enable_advanced_parallelization()

from torch import nn  # noqa: E402
from torchvision.models.detection import FCOS  # noqa: E402
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator  # noqa: E402
from torchvision.models.detection.ssd import SSD  # noqa: E402

NUM_CLASSES = 3


class Backbone(nn.Module):
    """Two convolutions; their channels are read by the detectors."""

    out_channels = 32

    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 32, 3, 2, 1), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, pictures):
        return self.layers(pictures)


def fcos():
    anchors = AnchorGenerator(sizes=((8,),), aspect_ratios=((1.0,),))
    return FCOS(Backbone(), NUM_CLASSES, min_size=64, max_size=96, anchor_generator=anchors, score_thresh=0.01)


def ssd():
    boxes = DefaultBoxGenerator([[2, 3]], scales=[0.2, 0.5], steps=[8])
    backbone = Backbone()
    backbone.out_channels = [backbone.out_channels]
    return SSD(backbone, boxes, (64, 64), NUM_CLASSES)


def batch(step, device, count=6):
    """Pictures of unequal sizes with one to three bright boxes."""
    pictures, targets = [], []
    for number in range(count):
        draws = torch.Generator().manual_seed(100 * step + number)
        height, width = (int(side) for side in torch.randint(56, 72, (2,), generator=draws))
        picture = torch.rand(3, height, width, generator=draws) / 2
        corners = torch.randint(4, 28, (1 + number % 3, 2), generator=draws)
        sides = torch.randint(12, 24, (1 + number % 3, 2), generator=draws)
        boxes = torch.cat([corners, corners + sides], dim=1)
        labels = torch.randint(1, NUM_CLASSES, (len(boxes),), generator=draws)
        for (left, top, right, bottom), label in zip(boxes, labels):
            picture[label, top:bottom, left:right] = 1.0
        target = {"boxes": boxes.float(), "labels": labels}
        pictures.append(picture.to(device))
        targets.append({name: value.to(device) for name, value in target.items()})
    return pictures, targets


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for make in (fcos, ssd):
        torch.manual_seed(2)
        model = make().to(device).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
        for step in range(3):
            pictures, targets = batch(step, device)
            losses = model(pictures, targets)
            loss = sum(losses.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            parts = (f"{name} {part.item():.6f}" for name, part in sorted(losses.items()))
            print(f"{make.__name__}: loss {loss.item():.6f}", *parts)
        model.eval()
        with torch.no_grad():
            found = [one["scores"].cpu() for one in model(pictures)]
        print(f"{make.__name__}: score {torch.cat(found).mean().item():.6f}")


if __name__ == "__main__":
    main()
