"""Trains torchvision's Faster R-CNN and RetinaNet with a tiny backbone: lists of unequal pictures and of targets.

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
from torch.utils.data import DataLoader, Dataset  # noqa: E402
from torchvision.models.detection import FasterRCNN, RetinaNet  # noqa: E402
from torchvision.models.detection.anchor_utils import AnchorGenerator  # noqa: E402
from torchvision.ops import MultiScaleRoIAlign  # noqa: E402

NUM_CLASSES = 3


class Boxes(Dataset):
    """Pictures of unequal sizes, each with one to three bright boxes."""

    def __len__(self):
        return 12

    def __getitem__(self, number):
        draws = torch.Generator().manual_seed(number)
        height, width = (int(side) for side in torch.randint(56, 72, (2,), generator=draws))
        picture = torch.rand(3, height, width, generator=draws) / 2
        corners = torch.randint(4, 28, (1 + number % 3, 2), generator=draws)
        sides = torch.randint(12, 24, (1 + number % 3, 2), generator=draws)
        boxes = torch.cat([corners, corners + sides], dim=1).float()
        labels = torch.randint(1, NUM_CLASSES, (len(boxes),), generator=draws)
        for (left, top, right, bottom), label in zip(boxes.int(), labels):
            picture[label, top:bottom, left:right] = 1.0
        return picture, {"boxes": boxes, "labels": labels, "image_id": torch.tensor([number])}


def backbone():
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1)]
    features = nn.Sequential(*layers, nn.ReLU())
    features.out_channels = 16
    return features


def faster_rcnn():
    return FasterRCNN(
        backbone(),
        NUM_CLASSES,
        min_size=64,
        max_size=96,
        rpn_anchor_generator=AnchorGenerator(sizes=((12, 20, 32),), aspect_ratios=((0.5, 1.0, 2.0),)),
        box_roi_pool=MultiScaleRoIAlign(featmap_names=["0"], output_size=3, sampling_ratio=2),
        rpn_batch_size_per_image=32,
        rpn_pre_nms_top_n_train=64,
        rpn_post_nms_top_n_train=32,
        box_batch_size_per_image=16,
    )


def retina_net():
    anchors = AnchorGenerator(sizes=((12, 20, 32),), aspect_ratios=((0.5, 1.0, 2.0),))
    return RetinaNet(backbone(), NUM_CLASSES, min_size=64, max_size=96, anchor_generator=anchors)


def train(model, loader, device):
    model.to(device).train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.01, momentum=0.9, weight_decay=5e-4)
    for _ in range(2):
        for pictures, targets in loader:
            pictures = [picture.to(device) for picture in pictures]
            targets = [{name: value.to(device) for name, value in target.items()} for target in targets]
            losses = model(pictures, targets)
            loss = sum(losses.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.6f}", *(f"{name} {part.item():.6f}" for name, part in sorted(losses.items())))
    model.eval()
    with torch.no_grad():
        for found in model([picture.to(device) for picture in pictures]):
            scores = found["scores"].cpu()
            print(f"found {len(scores)}, score {scores.sum() / max(1, len(scores)):.6f}")


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for make in (faster_rcnn, retina_net):
        torch.manual_seed(2)
        loader = DataLoader(Boxes(), batch_size=4, shuffle=True, collate_fn=lambda batch: tuple(zip(*batch)))
        train(make(), loader, device)


if __name__ == "__main__":
    main()
