"""Trains adapters of PEFT in a small Llama: DoRA, IA3, prompt tuning, prefix tuning; saves, loads and merges one.

With --ap it has the one line; prints losses.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

WORDS, ROWS, LENGTH = 50, 6, 10
ADAPTERS = {
    "DoRA": LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, use_dora=True, target_modules=["q_proj", "v_proj"]),
    "IA3": IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def make_model():
    torch.manual_seed(4)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def train(name, model, device):
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    model.train()
    for _ in range(3):
        words = torch.randint(1, WORDS, (ROWS, LENGTH))
        mask = torch.ones_like(words)
        mask[::2, 7:] = 0
        labels = words.masked_fill(mask == 0, -100)
        loss = model(words.to(device), attention_mask=mask.to(device), labels=labels.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{name}: loss {loss.item():.6f}")
    return words.to(device)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, adapter in ADAPTERS.items():
        model = get_peft_model(make_model(), adapter).to(device)
        torch.manual_seed(6)
        words = train(name, model, device)
        if name == "DoRA":
            model.eval().save_pretrained("adapter")
            with torch.no_grad():
                print(f"saved: loss {model(words, labels=words).loss.item():.6f}")
    merged = PeftModel.from_pretrained(make_model(), "adapter").merge_and_unload().to(device).eval()
    with torch.no_grad():
        print(f"merged: loss {merged(words, labels=words).loss.item():.6f}")


if __name__ == "__main__":
    main()
