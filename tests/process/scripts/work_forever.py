"""Does one thing after another until it is stopped: calls that draw, losses on parts, generation.

Each goes on until Ctrl-C, then begins anew and goes on until a worker is lost. Only the last end is not caught.
"""

import torch
from torch import nn
from torch.nn import functional as F

from moreh_ap import device
from moreh_ap.errors import WorkerLostError


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


for name, work in (("draw", draw), ("parts", loss_on_parts), ("generate", generate)):
    torch.moreh.option.enable_advanced_parallelization(plan="replicate=2", mixed_precision=False)
    for end in (KeyboardInterrupt, WorkerLostError):
        try:
            for number, _ in enumerate(work()):
                print(name, "until", end.__name__, "round", number)
        except end as error:
            print(name, "was ended by", end.__name__, error)
            if (work, end) == (generate, WorkerLostError):
                raise
    device.disable()
