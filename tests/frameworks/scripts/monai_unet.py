"""Segments made-up volumes with MONAI: dictionary transforms, MetaTensors, Dice, sliding windows, post transforms.

With --ap it has the one line; prints losses and Dice scores.
"""

import argparse

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ap", action="store_true", help="run with the one line")
options = parser.parse_args()
if options.ap:
    torch.moreh.option.enable_advanced_parallelization()

import numpy as np  # noqa: E402
from monai.data import CacheDataset, DataLoader, decollate_batch  # noqa: E402
from monai.inferers import sliding_window_inference  # noqa: E402
from monai.losses import DiceCELoss  # noqa: E402
from monai.metrics import DiceMetric  # noqa: E402
from monai.networks.nets import UNet  # noqa: E402
from monai.transforms import (  # noqa: E402
    AsDiscrete,
    Compose,
    EnsureChannelFirstd,
    EnsureTyped,
    RandCropByPosNegLabeld,
    RandRotate90d,
    ScaleIntensityd,
)
from monai.utils import set_determinism  # noqa: E402


def made_up_volumes(number):
    """Returns volumes of noise with a bright ball, and masks of the ball."""
    draws = np.random.default_rng(12)
    grid = np.stack(np.meshgrid(*[np.arange(24)] * 3, indexing="ij"))
    volumes = []
    for _ in range(number):
        centre = draws.integers(8, 16, 3)
        mask = (((grid - centre[:, None, None, None]) ** 2).sum(0) < 36).astype(np.float32)
        volumes.append({"image": (draws.random((24, 24, 24)) + mask).astype(np.float32), "label": mask})
    return volumes


def main():
    set_determinism(seed=0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    keys = ["image", "label"]
    common = [
        EnsureChannelFirstd(keys=keys, channel_dim="no_channel"),
        ScaleIntensityd(keys="image"),
        EnsureTyped(keys=keys),
    ]
    crops = RandCropByPosNegLabeld(keys=keys, label_key="label", spatial_size=[16, 16, 16], num_samples=2)
    augmented = Compose([*common, crops, RandRotate90d(keys=keys, prob=0.5, spatial_axes=[0, 2])])
    volumes = made_up_volumes(8)
    loader = DataLoader(CacheDataset(volumes[:6], augmented, progress=False), batch_size=2, shuffle=True)
    held_out = DataLoader(CacheDataset(volumes[6:], Compose(common), progress=False), batch_size=1)

    model = UNet(3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, dropout=0.1)
    model = model.to(device)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    metric = DiceMetric(include_background=False, reduction="mean")
    post = Compose([AsDiscrete(argmax=True, to_onehot=2)])
    post_label = Compose([AsDiscrete(to_onehot=2)])
    for epoch in range(2):
        model.train()
        for batch in loader:
            inputs, labels = batch["image"].to(device), batch["label"].to(device)
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.6f}")
        model.eval()
        with torch.no_grad():
            for batch in held_out:
                inputs, labels = batch["image"].to(device), batch["label"].to(device)
                outputs = sliding_window_inference(inputs, (16, 16, 16), 4, model)
                outputs = [post(output) for output in decollate_batch(outputs)]
                metric(y_pred=outputs, y=[post_label(label) for label in decollate_batch(labels)])
            print(f"Dice {metric.aggregate().item():.6f}")
            metric.reset()
    torch.save(model.state_dict(), "unet.pt")


if __name__ == "__main__":
    main()
