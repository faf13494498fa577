"""TRL's DPOTrainer, with a reference model and with adapters instead of one, and its RewardTrainer.

With --ap it has the one line.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

from datasets import Dataset
from made_up_words import sentences, tokenizer
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl_runs import make_model, show

SETTINGS = {
    "output_dir": "preferences",
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "max_length": 32,
    "logging_steps": 1,
    "save_strategy": "no",
    "bf16": False,
    "use_cpu": "--ap" not in sys.argv,
    "report_to": [],
    "disable_tqdm": True,
}
rows = Dataset.from_dict({"prompt": sentences(24, 1), "chosen": sentences(24, 2), "rejected": sentences(24, 3)})


def prefer(name, model, ref_model, peft_config):
    trainer = DPOTrainer(
        model=model,
        ref_model=ref_model,
        args=DPOConfig(**SETTINGS),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        processing_class=tokenizer(with_ends=False),
        peft_config=peft_config,
    )
    trainer.train()
    trainer.evaluate()
    show(name, trainer)


lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
prefer("reference", make_model(), make_model(), None)
prefer("adapters", make_model(), None, LoraConfig(task_type="CAUSAL_LM", **lora))
reward = RewardTrainer(
    model=make_model(labels=1),
    args=RewardConfig(**SETTINGS),
    train_dataset=rows.remove_columns("prompt"),
    processing_class=tokenizer(with_ends=False),
    peft_config=LoraConfig(task_type="SEQ_CLS", **lora),
)
reward.train()
show("reward", reward)
