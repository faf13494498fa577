"""A training run that is saved and loaded, for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from one_line_models import ragged_batches, tiny_llama

import moreh_ap

ROWS = 4


class Run:
    """A model with its optimizer and schedule, trained on fixed batches."""

    def __init__(self, device, seed, make=tiny_llama, optimizer=torch.optim.AdamW, **settings):
        torch.manual_seed(seed)
        self.device = device
        self.model = make().to(device)
        settings = {"lr": 1e-2, "eps": 1e-6} if optimizer is torch.optim.AdamW else {"lr": 1e-2, **settings}
        self.optimizer = optimizer(self.model.parameters(), **settings)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        self.step = 0

    def train(self, steps):
        losses = []
        for batch in ragged_batches(20, ROWS)[self.step : self.step + steps]:
            batch = {key: value.to(self.device) for key, value in batch.items()}
            loss = self.model(**batch, use_cache=False).loss
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        self.step += steps
        return [loss.item() for loss in losses]

    def save(self, folder):
        extra = {"step": self.step, "schedule": self.schedule.state_dict()}
        moreh_ap.save(folder, model=self.model, optimizer=self.optimizer, extra=extra)

    def load(self, folder, **options):
        extra = moreh_ap.load(folder, model=self.model, optimizer=self.optimizer, **options)
        self.step = extra["step"]
        self.schedule.load_state_dict(extra["schedule"])
        return self


def weights(model):
    """Copies of all saved tensors of a model."""
    return {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}


def files(folder, kind="*"):
    """The data files of a checkpoint."""
    return sorted(Path(folder).glob(f"*-{kind}.safetensors"))
