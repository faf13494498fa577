"""LoRA as peft's README shows it, on five families: made, trained, saved, loaded again and merged.

Adapters are made before the one line, after it, before `.to(device)` and after it. With --ap it has the one line; with
``--load FOLDER`` it only prints what the adapters in a folder, which another run has saved, give here.
"""

import sys

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
CONFIGS = {
    "gpt2": GPT2Config(
        vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1
    ),
    "llama": LlamaConfig(**SMALL, **HEADS),
    "mistral": MistralConfig(**SMALL, **HEADS, sliding_window=8),
    "qwen2": Qwen2Config(**SMALL, **HEADS),
    "classifier": LlamaConfig(**SMALL, **HEADS, num_labels=3, pad_token_id=0),
}
ADAPTERS = {
    "gpt2": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
    "llama": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "mistral": {"target_modules": "all-linear"},
    "qwen2": {"target_modules": ["q_proj", "v_proj", "gate_proj"], "modules_to_save": ["lm_head"]},
    "classifier": {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"},
}


def make_base(name):
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if name == "classifier" else AutoModelForCausalLM
    return kind.from_config(CONFIGS[name])


def add_adapter(model, name):
    torch.manual_seed(1)
    task = TaskType.SEQ_CLS if name == "classifier" else TaskType.CAUSAL_LM
    config = LoraConfig(task_type=task, r=4, lora_alpha=16, lora_dropout=0.05, **ADAPTERS[name])
    return get_peft_model(model, config)


made_before = add_adapter(make_base("gpt2"), "gpt2")  # before the one line

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)
device = "cuda" if "--ap" in sys.argv else "cpu"
folder = sys.argv[sys.argv.index("--load") + 1] if "--load" in sys.argv else f"adapters{device}"


def batches(name, count):
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        ids = torch.randint(1, 96, (6, 12), generator=generator)
        mask = torch.ones_like(ids)
        for row in range(6):
            mask[row, 12 - row :] = 0
        ids = ids * mask
        labels = ids.masked_fill(mask == 0, -100)
        if name == "classifier":
            labels = torch.randint(0, 3, (6,), generator=generator)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        yield {key: value.to(device) for key, value in batch.items()}


@torch.no_grad()
def show(name, what, model):
    model.eval()
    output = model(**next(iter(batches(name, 1))))
    print(f"{name} {what} loss {output.loss.item():.6f} logits {output.logits.float().abs().mean().item():.6f}")


def load(name):
    return PeftModel.from_pretrained(make_base(name).to(device), f"{folder}/{name}")


def train(name, model):
    model.print_trainable_parameters()
    frozen = {key: value.detach().cpu().clone() for key, value in model.named_parameters() if not value.requires_grad}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model.train()
    for step, batch in enumerate(batches(name, 5)):
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"{name} {step} loss {loss.item():.6f} norm {norm.item():.6f}")
    assert len(optimizer.state) == len(trained), "only adapters have a state"
    after = dict(model.named_parameters())
    assert all(torch.equal(value, after[key].detach().cpu()) for key, value in frozen.items()), "the base has changed"
    assert all(after[key].grad is None for key in frozen)
    show(name, "trained", model)
    model.save_pretrained(f"{folder}/{name}")
    with model.disable_adapter():
        show(name, "base", model)
    show(name, "again", model)
    if name in ("gpt2", "qwen2"):
        merged = model.merge_and_unload()
        assert not any("lora" in key for key in merged.state_dict())
        show(name, "merged", merged)
    else:
        show(name, "loaded", load(name))


if "--load" in sys.argv:
    for name in CONFIGS:
        show(name, "loaded", load(name))
else:
    train("gpt2", made_before.to(device))
    for name in ("llama", "qwen2"):
        train(name, add_adapter(make_base(name), name).to(device))
    for name in ("mistral", "classifier"):
        train(name, add_adapter(make_base(name).to(device), name))
