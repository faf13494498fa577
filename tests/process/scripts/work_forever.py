"""Does one thing until something happens from outside: calls that draw, losses on parts, or generation."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

torch.moreh.option.enable_advanced_parallelization(plan="replicate=2", mixed_precision=False)


def draw():
    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.5), nn.Linear(256, 1)).cuda()
    while True:
        model(torch.randn(32, 64).cuda()).square().mean().backward()
        yield


def loss_on_parts():
    model = nn.Sequential(nn.Embedding(512, 32), nn.Linear(32, 512)).cuda()
    ids = torch.randint(0, 512, (16, 64)).cuda()
    while True:
        logits = model(ids)
        F.cross_entropy(logits.log_softmax(-1).flatten(0, 1), ids.flatten()).backward()
        yield


def generate():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=64)).cuda()
    ids = torch.randint(1, 96, (2, 4)).cuda()
    while True:
        model.generate(ids, do_sample=True, max_new_tokens=8, min_new_tokens=8, pad_token_id=0)
        yield


for number, _ in enumerate({"draw": draw, "parts": loss_on_parts, "generate": generate}[sys.argv[1]]()):
    print("round", number)
