"""Trains a small transformer with torchao's optimizers of 8 and 4 bits and one with stochastic rounding of bfloat16.

With --ap it has the one line; prints losses.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

VOCABULARY = 50


class Decoder(nn.Module):
    """Returns logits of shape (rows, tokens, vocabulary)."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.block(self.embed(ids), src_mask=mask, is_causal=True))


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for make in (AdamW8bit, AdamW4bit, AdamWFp8):
        torch.manual_seed(1)
        model = Decoder().to(device)
        optimizer = make(model.parameters(), lr=1e-2)
        for _ in range(4):
            ids = torch.randint(0, VOCABULARY, (8, 16)).to(device)
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"{make.__name__}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
