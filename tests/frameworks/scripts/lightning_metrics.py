"""Fine-tunes a classifier with Lightning: a data module, metrics of torchmetrics in the model, a summary that counts
operations, frozen layers, averaged weights.

With --ap it has the one line; prints losses and metrics.
"""

import argparse

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--ap", action="store_true", help="run with the one line")
options = parser.parse_args()
if options.ap:
    torch.moreh.option.enable_advanced_parallelization()

import lightning as L  # noqa: E402
import torchmetrics  # noqa: E402
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelCheckpoint, ModelSummary  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

NUM_CLASSES = 4


class Pictures(L.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        draws = torch.Generator().manual_seed(3)
        classes = torch.randint(0, NUM_CLASSES, (144,), generator=draws)
        pictures = torch.randn(144, 3, 12, 12, generator=draws) + classes.view(-1, 1, 1, 1) / 2
        rows = {"fit": slice(0, 90), "validate": slice(90, 120), "test": slice(120, 144)}
        self.parts = {name: TensorDataset(pictures[part], classes[part]) for name, part in rows.items()}

    def train_dataloader(self):
        return DataLoader(self.parts["fit"], batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts["validate"], batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.parts["test"], batch_size=self.hparams.batch_size)


class Classifier(L.LightningModule):
    def __init__(self, lr=0.02):
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 3, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 12, 3),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(12 * 8 * 8, NUM_CLASSES)
        both = {
            "accuracy": torchmetrics.classification.MulticlassAccuracy(NUM_CLASSES),
            "f1": torchmetrics.classification.MulticlassF1Score(NUM_CLASSES),
        }
        self.train_metrics = torchmetrics.MetricCollection(both, prefix="train_")
        self.val_metrics = self.train_metrics.clone(prefix="val_")
        self.test_metrics = self.train_metrics.clone(prefix="test_")
        self.curve = torchmetrics.AUROC(task="multiclass", num_classes=NUM_CLASSES)
        self.example_input_array = torch.zeros(2, 3, 12, 12)

    def forward(self, pictures):
        return self.head(self.features(pictures))

    def training_step(self, batch, batch_index):
        pictures, classes = batch
        logits = self(pictures)
        loss = F.cross_entropy(logits, classes)
        measured = self.train_metrics(logits, classes)
        self.log_dict(measured, on_step=True)
        print(f"loss {loss.item():.6f} accuracy {measured['train_accuracy'].item():.6f}")
        return loss

    def validation_step(self, batch, batch_index):
        pictures, classes = batch
        logits = self(pictures)
        self.val_metrics.update(logits, classes)
        self.curve(logits.softmax(-1), classes)
        self.log("val_curve", self.curve)
        self.log("val_loss", F.cross_entropy(logits, classes), batch_size=len(classes))

    def on_validation_epoch_end(self):
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()

    def test_step(self, batch, batch_index):
        pictures, classes = batch
        self.test_metrics.update(self(pictures), classes)
        self.log_dict(self.test_metrics)

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.hparams.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class FreezeFirst(BaseFinetuning):
    """Trains the head alone in the first epoch."""

    def freeze_before_training(self, module):
        self.freeze(module.features)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.features, optimizer, lr=1e-3)


def print_metrics(metrics):
    print(" ".join(f"{name} {float(value):.6f}" for name, value in sorted(metrics.items())))


def main():
    L.seed_everything(7, workers=True)
    pictures, checkpoint = Pictures(), ModelCheckpoint(dirpath="best", monitor="val_loss", save_top_k=2, save_last=True)
    settings = {"accelerator": "auto", "devices": 1, "logger": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        max_epochs=2, callbacks=[FreezeFirst(), ModelSummary(2)], enable_checkpointing=False, **settings
    )
    model = Classifier()
    trainer.fit(model, datamodule=pictures)
    print_metrics(trainer.callback_metrics)

    for parameter in model.parameters():
        parameter.requires_grad = True
    average = EMAWeightAveraging(decay=0.8)
    trainer = L.Trainer(max_epochs=2, callbacks=[checkpoint, average], gradient_clip_val=0.5, **settings)
    trainer.fit(model, datamodule=pictures)
    print_metrics(trainer.callback_metrics)
    print(f"best {checkpoint.best_model_score.item():.6f}")
    print_metrics(trainer.test(datamodule=pictures, ckpt_path="best", verbose=False)[0])


if __name__ == "__main__":
    main()
