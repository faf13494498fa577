"""What scripts do with adapters after `get_peft_model`: several of them, merged in place, DoRA, recomputation.

With --ap it has the one line, and ``--plan PLAN`` a plan of its own.
"""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

if "--ap" in sys.argv:
    plan = {"plan": sys.argv[sys.argv.index("--plan") + 1]} if "--plan" in sys.argv else {}
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False, **plan)
device = "cuda" if "--ap" in sys.argv else "cpu"


def make_base():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def lora(**settings):
    return LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **settings)


def batch(seed):
    ids = torch.randint(0, 96, (6, 12), generator=torch.Generator().manual_seed(seed)).to(device)
    return {"input_ids": ids, "labels": ids}


def train(name, model, steps=3):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    model.train()
    for step in range(steps):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{name} {step} loss {loss.item():.6f}")


def show(name, model):
    model.eval()
    with torch.no_grad():
        print(f"{name} loss {model(**batch(9)).loss.item():.6f}")


def several_adapters():
    torch.manual_seed(1)
    model = get_peft_model(make_base(), lora(), adapter_name="first").to(device)
    train("first", model)
    model.add_adapter("second", lora(init_lora_weights="gaussian"))  # workers have the model already
    show("first of two", model)
    model.set_adapter("second")
    train("second", model)
    show("second", model)
    model.set_adapter("first")
    show("first again", model)
    model.base_model.set_adapter(["first", "second"])
    show("both", model)
    model.add_weighted_adapter(["first", "second"], [0.7, 0.3], "mixed", combination_type="linear")
    model.set_adapter("mixed")
    show("mixed", model)
    for step in range(2):  # back and forth: what is known of a state is used again
        with model.disable_adapter():
            show(f"without {step}", model)
        show(f"with {step}", model)
    model.delete_adapter("mixed")
    model.set_adapter("second")
    model.save_pretrained("two" + device)
    loaded = PeftModel.from_pretrained(make_base().to(device), f"two{device}/first", adapter_name="first")
    loaded.load_adapter(f"two{device}/second", adapter_name="second")
    show("loaded first", loaded)
    loaded.set_adapter("second")
    show("loaded second", loaded)
    train("loaded first, frozen", get_peft_model(make_base().to(device), lora(), adapter_name="first"), 1)
    trainable = PeftModel.from_pretrained(make_base().to(device), f"two{device}/first", "first", is_trainable=True)
    train("went on", trainable)


def merged_in_place():
    torch.manual_seed(1)
    model = get_peft_model(make_base(), lora(init_lora_weights="gaussian")).to(device)
    train("apart", model)
    show("apart", model)
    model.merge_adapter()
    show("merged", model)
    model.unmerge_adapter()
    show("unmerged", model)
    model.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 3.0)
    show("scaled", model)
    model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] = 2.0
    train("goes on", model)
    print(f"unloaded {sum(p.double().sum().item() for p in model.unload().parameters()):.6f}")


def dora():
    torch.manual_seed(1)
    model = get_peft_model(make_base(), lora(use_dora=True)).to(device)
    train("dora", model)
    show("dora", model)
    show("dora merged", model.merge_and_unload())


def recomputed(reentrant):
    torch.manual_seed(1)
    base = make_base().to(device)
    base.gradient_checkpointing_enable({"use_reentrant": reentrant})
    base.enable_input_require_grads()
    model = get_peft_model(base, lora())
    train(f"recomputed {'with' if reentrant else 'without'} reentry", model)
    base.gradient_checkpointing_disable()
    train("kept", model, 1)


def without_peft_around():
    torch.manual_seed(1)
    model = make_base().to(device)
    show("base", model)
    model.add_adapter(lora(init_lora_weights="gaussian"), adapter_name="own")  # transformers' own way
    train("own", model)
    model.disable_adapters()
    show("own disabled", model)
    model.enable_adapters()
    show("own enabled", model)


parts = {
    "several": several_adapters,
    "merged": merged_in_place,
    "dora": dora,
    "reentrant": lambda: recomputed(True),
    "recomputed": lambda: recomputed(False),
    "transformers": without_peft_around,
}
asked = [name for name in parts if f"--{name}" in sys.argv]
for name in asked or parts:
    parts[name]()
