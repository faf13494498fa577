"""transformers' Trainer with LoRA: trains, keeps checkpoints of the adapter, goes on from one of them.

With --ap it has the one line.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = torch.randint(0, 96, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def make(epochs, **settings):
    set_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    arguments = TrainingArguments(
        output_dir="lora" + ("-ap" if "--ap" in sys.argv else ""),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=epochs,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        logging_steps=2,
        save_strategy="epoch",
        report_to=[],
        use_cpu="--ap" not in sys.argv,
        disable_tqdm=True,
        **settings,
    )
    return Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())


def show(trainer, name):
    for entry in trainer.state.log_history:
        for key in ("loss", "grad_norm", "train_loss"):
            if key in entry:
                print(f"{name} {entry['step']} {key} {entry[key]:.6f}")
    print(f"{name} eval loss {trainer.evaluate()['eval_loss']:.6f}")


whole = make(3)
whole.train()
show(whole, "whole")
resumed = make(3)
resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-8")
show(resumed, "resumed")
recomputed = make(1, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
recomputed.train()
show(recomputed, "recomputed")
