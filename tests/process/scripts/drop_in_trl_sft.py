"""TRL's SFTTrainer as its README shows it: plain text, packed and not, prompts with completions, LoRA.

With --ap it has the one line, with ``--plan PLAN`` a plan of its own; --bf16 is TRL's default.
"""

import sys

import torch

if "--ap" in sys.argv:
    plan = {"plan": sys.argv[sys.argv.index("--plan") + 1]} if "--plan" in sys.argv else {}
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False, **plan)

from datasets import Dataset
from made_up_words import sentences, tokenizer
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
from trl_runs import make_model, show


def train(name, rows, peft_config=None, **settings):
    trainer = SFTTrainer(
        model=make_model(),
        args=SFTConfig(
            output_dir="sft",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=4,
            learning_rate=1e-2,
            max_length=16,
            logging_steps=1,
            save_strategy="no",
            bf16="--bf16" in sys.argv,
            use_cpu="--ap" not in sys.argv,
            report_to=[],
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        processing_class=tokenizer(with_ends=False),
        peft_config=peft_config,
    )
    assert trainer.args.n_gpu <= 1 and trainer.args.world_size == 1 and trainer.accelerator.num_processes == 1
    trainer.train()
    trainer.evaluate()
    show(name, trainer)


text = Dataset.from_dict({"text": sentences(48, 1)})
pairs = Dataset.from_dict({"prompt": sentences(32, 2), "completion": sentences(32, 3)})
lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
train("plain", text)
train("completion", pairs)
train("packed", text, packing=True, packing_strategy="wrapped")
train("lora", text, lora, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
train("kept", text, lora, gradient_checkpointing=False)
