"""Accelerate's `Accelerator()` used directly: prepare, accumulate, clip, gather, save and load its state.

With --ap it has the one line; prints losses and accuracies.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2, cpu="--ap" not in sys.argv)
set_seed(7)
inputs = torch.randn(96, 12)
labels = (inputs.sum(1) > 0).long() + (inputs[:, 0] > 0.5).long()
train_loader = DataLoader(TensorDataset(inputs[:72], labels[:72]), 8, shuffle=True)
eval_loader = DataLoader(TensorDataset(inputs[72:], labels[72:]), 7)
model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(24, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)
assert accelerator.num_processes == 1 and accelerator.is_main_process


def train(epoch):
    model.train()
    for x, y in train_loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {accelerator.gather(loss.detach()).mean().item():.6f}")


def evaluate():
    model.eval()
    correct = 0
    with torch.inference_mode():
        for x, y in eval_loader:
            guessed, expected = accelerator.gather_for_metrics((model(x).argmax(-1), y))
            correct += (guessed == expected).sum().item()
    accelerator.print(f"accuracy {correct / len(eval_loader.dataset):.6f}")


folder = "state-ap" if "--ap" in sys.argv else "state"
train(0)
accelerator.save_state(folder)
train(1)
evaluate()
accelerator.load_state(folder)
train(2)
evaluate()
unwrapped = accelerator.unwrap_model(model)
assert type(unwrapped) is torch.nn.Sequential
accelerator.save(accelerator.get_state_dict(model), folder + "/model.pt")
accelerator.save_model(model, folder + "/whole")
print(f"norm {sum(v.norm() for v in torch.load(folder + '/model.pt').values()):.6f}")
