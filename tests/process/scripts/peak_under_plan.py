"""Trains a random Llama for two steps under a plan and prints the peak resident memory of every worker.

python peak_under_plan.py PLAN HIDDEN LAYERS BATCH LENGTH
"""

import sys

import torch
from load_under_plan import print_worker_peaks
from transformers import LlamaConfig, LlamaForCausalLM

plan, (hidden, layers, batch, length) = sys.argv[1], map(int, sys.argv[2:])
torch.moreh.option.enable_advanced_parallelization(plan=plan, mixed_precision=False)
config = LlamaConfig(
    vocab_size=256, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=8
)
model = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.zeros(batch, length, dtype=torch.long).cuda()
for _ in range(2):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
print_worker_peaks()
