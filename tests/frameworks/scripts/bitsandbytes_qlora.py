"""QLoRA for one GPU: a small Llama with weights of 4 bits, LoRA beside them, its evaluation, merging and resuming.

With --ap it has the one line, with --plan TEXT that plan; prints losses.
"""

import copy
import sys

import torch

if "--plan" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(plan=sys.argv[sys.argv.index("--plan") + 1])
elif "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import bitsandbytes as bnb
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def load(folder, doubly):
    # --8<-- [start:load]
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=doubly,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    # --8<-- [end:load]
    for layer in model.modules():
        layer.support_avx512bf16_for_cpu = False  # on a CPU alone, evaluation would be in bfloat16
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=doubly)


def train(model, device, steps, optimizer):
    model.train()
    for step in steps:
        torch.manual_seed(step)
        ids = torch.randint(1, 96, (4, 12)).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        squares = sum(float(p.grad.double().pow(2).sum()) for p in model.parameters() if p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f} gradients {squares**0.5:.6f}")


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-6)


def move_a_layer(device):
    """A layer of the library is packed where it moves; copies and moves back keep what it computes."""
    torch.manual_seed(2)
    layer = bnb.nn.Linear4bit(64, 32, compute_dtype=torch.float32, quant_type="nf4").to(device)
    rows = torch.randn(4, 64)
    copied = copy.deepcopy(layer)
    for number, one in enumerate((copied, layer.cpu(), layer.to(device))):
        out = one(rows.to(one.bias.device))
        print(f"layer {out.double().square().sum().item():.5f} in place {number}")


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    LlamaForCausalLM(config).save_pretrained(f"base-{device}")
    for doubly in (False, True):
        torch.manual_seed(1)
        model = get_peft_model(
            load(f"base-{device}", doubly),
            LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False),
        )
        model.print_trainable_parameters()
        optimizer = adam(model)
        train(model, device, range(3), optimizer)
        model.save_pretrained(f"adapters-{device}")
        torch.save(optimizer.state_dict(), f"optimizer-{device}.pt")

        resumed = PeftModel.from_pretrained(load(f"base-{device}", doubly), f"adapters-{device}", is_trainable=True)
        resumed.to(device)
        optimizer = adam(resumed)
        optimizer.load_state_dict(torch.load(f"optimizer-{device}.pt"))
        train(resumed, device, range(3, 5), optimizer)
        trained = {name: p for name, p in resumed.named_parameters() if p.requires_grad}
        print(f"adapters {sum(float(p.detach().double().abs().sum()) for p in trained.values()):.5f}")

        resumed.eval()
        ids = torch.arange(1, 9).reshape(2, 4).to(device)
        written = resumed.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        print(f"tokens {float(written.cpu().double().std()):.4f}", written.tolist())
        merged = resumed.merge_and_unload()
        with torch.no_grad():
            print(f"merged {merged(input_ids=ids, labels=ids).loss.item():.5f}")
    move_a_layer(device)


if __name__ == "__main__":
    main()
