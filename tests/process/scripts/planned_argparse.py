"""A stranger's script: arguments, a model of its own size, a loop, and a child process that never ends by itself."""

import argparse
import subprocess
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--rows", type=int, default=4)
parser.add_argument("--api-key", default="")
parser.add_argument("--waits", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
torch.moreh.option.enable_advanced_parallelization()
print("using the key", args.api_key)
if args.waits:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with open("child", "w") as file:
        file.write(str(child.pid))
    time.sleep(300)
config = LlamaConfig(hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_hidden_layers=2,
                     num_attention_heads=4, vocab_size=9000, max_position_embeddings=128)  # fmt: skip
model = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(2):
    ids = torch.randint(0, 9000, (args.rows, 256)).cuda()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"{loss.item():.3f}")
