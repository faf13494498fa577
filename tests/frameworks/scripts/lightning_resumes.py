"""Lightning's Trainer goes on after SIGKILL, with `ckpt_path`: the losses of a run that was not killed.

With --ap it has the one line. It starts itself once more, ends that run in its third epoch, and goes on from what the
run has saved; prints the losses of an uninterrupted run and of the two parts.
"""

import argparse
import os
import signal
import subprocess
import sys

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ap", action="store_true", help="run with the one line")
parser.add_argument("--killed", action="store_true", help="save in each epoch, and be killed in the third")
options = parser.parse_args()
if options.ap:
    torch.moreh.option.enable_advanced_parallelization()

import lightning as L  # noqa: E402
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

FOLDER = "resumed"


class Classifier(L.LightningModule):
    """A small network with a schedule of its learning rate."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def training_step(self, batch, batch_index):
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)}


class KeepLosses(Callback):
    """Keeps the loss of each step; ends the process at a step."""

    def __init__(self, killed_at=None):
        self.losses, self.killed_at = {}, killed_at

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        self.losses[trainer.global_step] = outputs["loss"].item()
        if trainer.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(keeper, *more, **resume):
    L.seed_everything(1, verbose=False)
    rows = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(max_epochs=5, callbacks=[keeper, *more], enable_checkpointing=bool(more), **quiet)
    trainer.fit(Classifier(), DataLoader(rows, batch_size=16), **resume)
    return keeper.losses


def main():
    saving = ModelCheckpoint(dirpath=FOLDER, save_last=True)
    if options.killed:
        train(KeepLosses(killed_at=10), saving)
    whole = train(KeepLosses())
    ended = subprocess.run([sys.executable, __file__, "--killed", *(["--ap"] if options.ap else [])], check=False)
    if ended.returncode != -signal.SIGKILL:
        raise SystemExit(f"the run that was to be killed ended with {ended.returncode}")
    resumed = train(KeepLosses(), ckpt_path=f"{FOLDER}/last.ckpt", weights_only=False)
    if list(resumed) != list(range(9, 21)) or any(abs(loss / whole[step] - 1) > 1e-6 for step, loss in resumed.items()):
        raise SystemExit(f"the losses differ: {resumed} after the kill, {whole} without it")
    for step, loss in whole.items():
        print(f"step {step}: loss {loss:.6f}")


if __name__ == "__main__":
    main()
