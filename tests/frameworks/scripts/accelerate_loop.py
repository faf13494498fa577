"""A training loop with Accelerate: gradients accumulated, clipped, a prepared schedule, a saved and a loaded state.

With --ap it has the one line; prints losses.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    set_seed(7)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
    inputs = torch.randn(48, 12)
    classes = inputs[:, :3].argmax(dim=1)
    loader = DataLoader(TensorDataset(inputs, classes), batch_size=8, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    loss_of = nn.CrossEntropyLoss()
    for epoch in range(3):
        model.train()
        for batch, targets in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model(batch), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.6f}")
        if epoch == 1:
            accelerator.save_state("state")
    model.eval()
    for name in ("trained", "loaded"):
        with torch.no_grad():
            found = accelerator.gather_for_metrics(model(inputs.to(accelerator.device))).cpu()
        accelerator.print(f"{name}: loss {loss_of(found, classes).item():.6f}")
        accelerator.load_state("state")


if __name__ == "__main__":
    main()
