"""Trains an autoencoder and a manually optimised network with Lightning's Trainer: validation, callbacks, checkpoints.

With --ap it has the one line; prints losses and what the callbacks recorded.
"""

import argparse

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ap", action="store_true", help="run with the one line")
options = parser.parse_args()
if options.ap:
    torch.moreh.option.enable_advanced_parallelization()

import lightning as L  # noqa: E402
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset, random_split  # noqa: E402


class AutoEncoder(L.LightningModule):
    """Gives back pictures of 8 x 8 through a code of three numbers."""

    def __init__(self, hidden=32, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, pictures):
        return self.encoder(pictures.flatten(1))

    def training_step(self, batch, batch_index):
        pictures, _ = batch
        flat = pictures.view(pictures.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(flat)), flat)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_index):
        pictures, _ = batch
        self.log("val_loss", F.mse_loss(self.decoder(self(pictures)), pictures.flatten(1)), prog_bar=True)

    def predict_step(self, batch, batch_index):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


class ManualClassifier(L.LightningModule):
    """Two optimizers stepped by hand: one for the features, one for the head."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh())
        self.head = nn.Linear(16, 4)

    def training_step(self, batch, batch_index):
        pictures, classes = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        loss = F.cross_entropy(self.head(self.features(pictures)), classes)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
        self.log("train_loss", loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.features.parameters(), lr=0.1), torch.optim.Adam(self.head.parameters(), lr=1e-2)


class PrintLosses(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        print(f"step {trainer.global_step}: loss {trainer.callback_metrics['train_loss'].item():.6f}")

    def on_validation_epoch_end(self, trainer, module):
        print(f"validation loss {trainer.callback_metrics['val_loss'].item():.6f}")


def main():
    L.seed_everything(1, verbose=False)
    pictures = TensorDataset(torch.rand(160, 1, 8, 8), torch.randint(0, 4, (160,)))
    training, held_out = random_split(pictures, [128, 32])
    loader, held_out = DataLoader(training, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=32)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}

    best = ModelCheckpoint(dirpath="checkpoints", monitor="val_loss", filename="{epoch}")
    callbacks = [PrintLosses(), best, EarlyStopping("val_loss"), LearningRateMonitor()]
    trainer = L.Trainer(max_epochs=3, callbacks=callbacks, gradient_clip_val=1.0, logger=CSVLogger("logs"), **quiet)
    trainer.fit(AutoEncoder(), loader, held_out)
    print(f"best val_loss {best.best_model_score.item():.6f}")
    restored = AutoEncoder.load_from_checkpoint(best.best_model_path)
    (metrics,) = trainer.validate(restored, held_out, verbose=False)
    print(f"restored: loss {metrics['val_loss']:.6f}")
    codes = torch.cat(trainer.predict(restored, held_out))
    print(f"codes {codes.abs().mean():.6f}")

    resumed = L.Trainer(max_epochs=4, callbacks=[PrintLosses()], logger=False, enable_checkpointing=False, **quiet)
    resumed.fit(AutoEncoder(), loader, held_out, ckpt_path=best.best_model_path, weights_only=False)

    manual = L.Trainer(max_epochs=2, callbacks=[PrintLosses()], logger=False, enable_checkpointing=False, **quiet)
    manual.fit(ManualClassifier(), loader)


if __name__ == "__main__":
    main()
