"""Trains a small CLIP of transformers on pairs of pictures and words, then classifies pictures by words.

With --ap it has the one line; prints losses and probabilities.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from transformers import CLIPConfig, CLIPModel

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
WORDS, ROWS = 50, 8


def pairs():
    """Pictures, and words with padding at their ends."""
    words = torch.randint(3, WORDS, (ROWS, 9))
    words[:, -1] = WORDS - 1  # the end of the text, whose state stands for it
    mask = torch.ones_like(words)
    words[::2, 6], words[::2, 7:], mask[::2, 7:] = WORDS - 1, 0, 0
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "input_ids": words, "attention_mask": mask}


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(2)
    config = CLIPConfig(
        text_config={
            **SIZES,
            "vocab_size": WORDS,
            "max_position_embeddings": 16,
            "eos_token_id": WORDS - 1,
            "bos_token_id": 1,
            "pad_token_id": 0,
        },
        vision_config={**SIZES, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    model = CLIPModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(5):
        batch = {name: value.to(device) for name, value in pairs().items()}
        outputs = model(**batch, return_loss=True)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {outputs.loss.item():.6f}")
    model.eval()
    with torch.no_grad():
        probabilities = model(**batch).logits_per_image.softmax(dim=1).cpu()
    print(f"of the right words: probability {probabilities.diagonal().mean().item():.6f}")


if __name__ == "__main__":
    main()
