"""Trains a small T5 of transformers to turn words round, with labels that are padded, and generates.

With --ap it has the one line; prints losses and what was generated.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from torch.optim.lr_scheduler import LambdaLR
from transformers import T5Config, T5ForConditionalGeneration

WORDS, ROWS, LENGTH = 40, 8, 7


def sentences():
    """Words with padding at their ends, and the same words turned round as labels."""
    words = torch.randint(2, WORDS, (ROWS, LENGTH))
    labels = torch.cat([words.flip(1), torch.ones(ROWS, 1, dtype=torch.long)], dim=1)
    mask = torch.ones_like(words)
    mask[::3, 5:], labels[::3, 5:] = 0, -100
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(5)
    config = T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )
    model = T5ForConditionalGeneration(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    model.train()
    for _ in range(6):
        batch = {name: value.to(device) for name, value in sentences().items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
    model.eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        print(f"held-out: loss {model(**batch).loss.item():.6f}")
        print("generated", model.generate(**inputs, max_new_tokens=5, num_beams=2).cpu()[:2].tolist())


if __name__ == "__main__":
    main()
