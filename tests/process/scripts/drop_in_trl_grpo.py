"""TRL's GRPOTrainer, which generates what it is rewarded for, with a KL penalty and two updates a generation.

With --ap it has the one line.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

from datasets import Dataset
from made_up_words import sentences, tokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_runs import make_model, show


def different_words(completions, **columns):
    return [float(len(set(completion.split()))) for completion in completions]


make_model().save_pretrained("start")  # from where the trainer loads a second one as a reference
trainer = GRPOTrainer(
    model="start",
    reward_funcs=different_words,
    args=GRPOConfig(
        output_dir="grpo",
        per_device_train_batch_size=8,
        num_generations=4,
        num_iterations=2,
        max_completion_length=8,
        max_steps=4,
        learning_rate=1e-3,
        beta=0.04,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        use_cpu="--ap" not in sys.argv,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"prompt": sentences(16, 1)}),
    processing_class=tokenizer(with_ends=False),
)
trainer.train()
show("grpo", trainer)
