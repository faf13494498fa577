"""transformers' Trainer with dropout and a schedule: goes on from its last checkpoint, if there is one.

Arguments: the plan, the folder, seconds that each step takes longer. Prints a loss a step, with all its digits.
"""

from __future__ import annotations

import sys
import time

import torch

plan, folder, sleep_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
torch.moreh.option.enable_advanced_parallelization(plan=plan)

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

set_seed(0)
rows = torch.randint(0, 64, (48, 8), generator=torch.Generator().manual_seed(1))
dataset = [{"input_ids": row, "labels": row} for row in rows]


class PrintingTrainer(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        print(f"loss {self.state.global_step} {loss.item()!r}", flush=True)
        time.sleep(sleep_s)
        return loss


arguments = TrainingArguments(
    output_dir=folder,
    per_device_train_batch_size=4,
    max_steps=24,  # two epochs
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    save_steps=5,
    save_total_limit=2,
    report_to=[],
    disable_tqdm=True,
)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2))
trainer = PrintingTrainer(model=model, args=arguments, train_dataset=dataset)
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
