"""Trains a small ResNet of timm: mixup, label smoothing, weights averaged over steps, layer decay, a cosine schedule.

With --ap it has the one line; prints losses and accuracies.
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
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy  # noqa: E402
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.scheduler import CosineLRScheduler  # noqa: E402
from timm.utils import ModelEmaV3, accuracy  # noqa: E402

NUM_CLASSES, BATCH_SIZE = 6, 16


def evaluate(model, pictures, classes):
    """Returns the loss and the accuracy in per cent."""
    model.eval()
    with torch.inference_mode():
        logits = model(pictures)
        (top,) = accuracy(logits, classes, topk=(1,))
        return LabelSmoothingCrossEntropy(0.1)(logits, classes).item(), top.item()


def main():
    torch.manual_seed(11)
    np.random.seed(11)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    classes = torch.randint(0, NUM_CLASSES, (5 * BATCH_SIZE,))
    pictures = torch.randn(len(classes), 3, 32, 32) + classes.view(-1, 1, 1, 1) / 3

    model = timm.create_model("resnet10t.c3_in1k", pretrained=False, num_classes=NUM_CLASSES, drop_path_rate=0.1)
    model = model.to(device, memory_format=torch.channels_last)
    average = ModelEmaV3(model, decay=0.9, use_warmup=True)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=NUM_CLASSES)
    mixup_loss = SoftTargetCrossEntropy()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05, layer_decay=0.8)
    schedule = CosineLRScheduler(optimizer, t_initial=3, warmup_t=1, warmup_lr_init=1e-4)
    num_updates = 0
    for epoch in range(3):
        model.train()
        for begin in range(0, 4 * BATCH_SIZE, BATCH_SIZE):
            batch = slice(begin, begin + BATCH_SIZE)
            inputs, targets = pictures[batch].clone().to(device), classes[batch].to(device)
            inputs, targets = mixup(inputs, targets)
            loss = mixup_loss(model(inputs.contiguous(memory_format=torch.channels_last)), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            num_updates += 1
            average.update(model, step=num_updates)
            print(f"epoch {epoch}: loss {loss.item():.6f}")
        schedule.step(epoch + 1)
    held_out = pictures[-BATCH_SIZE:].to(device), classes[-BATCH_SIZE:].to(device)
    for name, which in (("model", model), ("average", average.module)):
        print(f"{name}: " + "held-out loss {:.6f}, accuracy {:.6f}".format(*evaluate(which, *held_out)))


if __name__ == "__main__":
    main()
