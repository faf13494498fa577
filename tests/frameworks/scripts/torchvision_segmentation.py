"""Trains torchvision's LR-ASPP and FCN heads on made-up masks: auxiliary losses, polynomial learning rates, metrics.

With --ap it has the one line; prints losses and accuracies.
"""

import argparse

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ap", action="store_true", help="run with the one line")
options = parser.parse_args()
if options.ap:
    torch.moreh.option.enable_advanced_parallelization()

from torch.nn import functional as F  # noqa: E402
from torchvision.models import resnet18  # noqa: E402
from torchvision.models._utils import IntermediateLayerGetter  # noqa: E402
from torchvision.models.segmentation import FCN, lraspp_mobilenet_v3_large  # noqa: E402
from torchvision.models.segmentation.fcn import FCNHead  # noqa: E402

NUM_CLASSES, BATCH_SIZE, IGNORED = 4, 8, 255


def made_up_masks(number):
    """Returns pictures, and the class of every pixel; some have none."""
    masks = torch.randint(0, NUM_CLASSES, (number, 4, 4)).repeat_interleave(12, 1).repeat_interleave(12, 2)
    pictures = torch.randn(number, 3, 48, 48) / 2 + masks.unsqueeze(1)
    masks[torch.rand(masks.shape) < 0.1] = IGNORED
    return pictures, masks


def fcn_resnet18():
    layers = IntermediateLayerGetter(resnet18(), return_layers={"layer3": "aux", "layer4": "out"})
    return FCN(layers, FCNHead(512, NUM_CLASSES), FCNHead(256, NUM_CLASSES))


def criterion(outputs, masks):
    losses = {name: F.cross_entropy(logits, masks, ignore_index=IGNORED) for name, logits in outputs.items()}
    return losses["out"] + 0.5 * losses["aux"] if "aux" in losses else losses["out"]


def confusion(masks, predicted):
    """Returns how often each class was taken for each other."""
    known = masks != IGNORED
    return torch.bincount(NUM_CLASSES * masks[known] + predicted[known], minlength=NUM_CLASSES**2).view(NUM_CLASSES, -1)


def train(model, device):
    model.to(device)
    heads = {id(parameter) for parameter in model.classifier.parameters()}
    groups = [
        {"params": [parameter for parameter in model.parameters() if id(parameter) not in heads]},
        {"params": list(model.classifier.parameters()), "lr": 0.02},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=4, power=0.9)
    for _ in range(4):
        model.train()
        pictures, masks = (tensor.to(device) for tensor in made_up_masks(BATCH_SIZE))
        loss = criterion(model(pictures), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(f"loss {loss.item():.6f}")
    model.eval()
    with torch.inference_mode():
        pictures, masks = (tensor.to(device) for tensor in made_up_masks(BATCH_SIZE))
        counts = confusion(masks, model(pictures)["out"].argmax(1)).float()
        print(f"accuracy {(counts.diag().sum() / counts.sum()).item():.2f}")


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(6)
    train(lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=NUM_CLASSES), device)
    train(fcn_resnet18(), device)


if __name__ == "__main__":
    main()
