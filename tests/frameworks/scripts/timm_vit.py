"""Trains a small ViT of timm: layer decay, Mixup, weights averaged over steps, accumulation; then ConvNeXt with LAMB.

With --ap it has the one line; prints losses.
"""

import argparse

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ap", action="store_true", help="run with the one line")
options = parser.parse_args()
if options.ap:
    torch.moreh.option.enable_advanced_parallelization()

import numpy as np  # noqa: E402
import timm  # noqa: E402
from timm.data import Mixup  # noqa: E402
from timm.loss import SoftTargetCrossEntropy  # noqa: E402
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.utils import ModelEmaV3, NativeScaler  # noqa: E402

NUM_CLASSES, ROWS = 5, 8


def train(name, model, optimizer, device):
    average = ModelEmaV3(model, decay=0.9)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=NUM_CLASSES)
    loss_of, scaler = SoftTargetCrossEntropy(), NativeScaler(device=device.type)
    model.train()
    for step in range(4):
        classes = torch.randint(0, NUM_CLASSES, (ROWS,))
        pictures = torch.randn(ROWS, 3, 32, 32) + classes.view(-1, 1, 1, 1) / 3
        pictures, targets = mixup(pictures.to(device), classes.to(device))
        loss = loss_of(model(pictures), targets) / 2
        is_last = step % 2 == 1
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), need_update=is_last)
        if is_last:
            optimizer.zero_grad()
            average.update(model, step=step)
        print(f"{name}: loss {loss.item():.6f}")
    average.module.eval()
    with torch.no_grad():
        print(f"{name}: average {average.module(pictures).abs().mean().item():.6f}")


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(9)
    np.random.seed(9)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
    model = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, num_classes=NUM_CLASSES, drop_path_rate=0.1, **sizes
    ).to(device)
    train("ViT", model, create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05, layer_decay=0.7), device)
    model = timm.create_model("convnext_atto", pretrained=False, num_classes=NUM_CLASSES, dims=(8, 16, 32, 64)).to(
        device
    )
    train("ConvNeXt", model, create_optimizer_v2(model, opt="lamb", lr=2e-3, weight_decay=0.05), device)


if __name__ == "__main__":
    main()
