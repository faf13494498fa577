"""A decoder in one file: trains with accumulated gradients, evaluates, saves, resumes in a new model, generates.

    python tutorials/own_script.py                       # as it was written, for one GPU or for the CPU
    python tutorials/own_script.py --ap                  # with the one line: the same losses
    python tutorials/own_script.py --ap --width 512      # a model that is large enough for two CPU workers

Stands for a script of yours: nothing of it was written for this package. Prints losses, norms of gradients and
generated tokens. docs/ap/own-script.md goes through what the one line makes of each part.
"""

import argparse
import inspect
import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ap", action="store_true", help="with the one line")
parser.add_argument("--width", type=int, default=32, help="of the model")
args = parser.parse_args()

# --8<-- [start:line]
if args.ap:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)
# --8<-- [end:line]

NUM_STEPS, NUM_WARMUP, NUM_ACCUMULATED, BATCH_SIZE = 12, 3, 2, 8
LOWEST_RATE, HIGHEST_RATE = 1e-3, 1e-2


@dataclass
class Sizes:
    """The sizes of a model; the window is the longest text that it reads, in tokens."""

    num_tokens: int = 64
    window: int = 16
    width: int = 32
    num_heads: int = 4
    num_layers: int = 2
    dropout: float = 0.1


class Layer(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        wide = 4 * sizes.width
        self.feed_forward = nn.Sequential(nn.Linear(sizes.width, wide), nn.GELU(), nn.Linear(wide, sizes.width))
        self.attention = Attention(sizes)
        self.attention_norm, self.feed_forward_norm = (nn.LayerNorm(sizes.width) for _ in range(2))

    def forward(self, states_BTC):
        states_BTC = self.attention(self.attention_norm(states_BTC)) + states_BTC
        return self.feed_forward(self.feed_forward_norm(states_BTC)) + states_BTC


class Attention(nn.Module):
    """Causal attention; its mask is a buffer that checkpoints hold, under a name that parameters often have."""

    def __init__(self, sizes):
        super().__init__()
        visible = torch.tril(torch.ones(sizes.window, sizes.window))
        self.register_buffer("bias", visible.view(1, 1, *visible.shape))
        self.width, self.num_heads = sizes.width, sizes.num_heads
        self.qkv = nn.Linear(self.width, self.width * 3, bias=False)
        self.output = nn.Linear(self.width, self.width, bias=False)

    def forward(self, states_BTC):
        length = states_BTC.size(1)
        query_BHTD, key_BHTD, value_BHTD = map(self.by_heads, self.qkv(states_BTC).split(self.width, dim=2))
        scores_BHTT = query_BHTD @ key_BHTD.transpose(-2, -1) / math.sqrt(key_BHTD.size(-1))
        hidden = self.bias[:, :, :length, :length] == 0
        weights_BHTT = F.softmax(scores_BHTT.masked_fill(hidden, float("-inf")), dim=-1)
        mixed_BTHD = (weights_BHTT @ value_BHTD).transpose(1, 2)
        return self.output(mixed_BTHD.contiguous().view(states_BTC.size()))

    def by_heads(self, part_BTC):
        batch, length, width = part_BTC.size()
        return part_BTC.view(batch, length, self.num_heads, width // self.num_heads).transpose(1, 2)


class Decoder(nn.Module):
    """Predicts the next token; the embedding and the output layer share one weight."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.output = nn.Linear(sizes.width, sizes.num_tokens, bias=False)
        parts = {"layers": nn.ModuleList(Layer(sizes) for _ in range(sizes.num_layers))}
        parts["token"], parts["position"] = (nn.Embedding(n, sizes.width) for n in (sizes.num_tokens, sizes.window))
        parts["dropout"], parts["norm"] = nn.Dropout(sizes.dropout), nn.LayerNorm(sizes.width)
        self.parts = nn.ModuleDict(parts)
        self.parts.token.weight = self.output.weight
        self.apply(self.draw_weights)

    def draw_weights(self, module):
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            return
        nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def num_weights(self):
        """Returns the number of weights, without those of the positions."""
        return sum(weight.numel() for weight in self.parameters()) - self.parts.position.weight.numel()

    def forward(self, tokens_BT, following_BT=None):
        """Returns scores and loss; without `following_BT`, scores of the last position, and None."""
        parts = self.parts
        positions = torch.arange(0, tokens_BT.size(1), dtype=torch.long, device=tokens_BT.device)
        states_BTC = parts.dropout(parts.token(tokens_BT) + parts.position(positions))
        for layer in parts.layers:
            states_BTC = layer(states_BTC)
        states_BTC = parts.norm(states_BTC)
        if following_BT is None:
            return self.output(states_BTC[:, [-1], :]), None
        scores_BTV = self.output(states_BTC)
        flat = scores_BTV.view(-1, scores_BTV.size(-1))
        return scores_BTV, F.cross_entropy(flat, following_BT.view(-1), ignore_index=-1)

    def optimizer(self, device_type):
        """Returns AdamW that decays matrices only; fused where PyTorch can and the device is a GPU."""
        decayed, others = [], []
        for _, weight in self.named_parameters():
            if weight.requires_grad:
                (decayed if weight.dim() > 1 else others).append(weight)
        can_fuse = "fused" in inspect.signature(torch.optim.AdamW).parameters
        options = {"fused": True} if can_fuse and device_type == "cuda" else {}
        groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), lr=HIGHEST_RATE, **options)

    @torch.no_grad()
    def generate(self, tokens_BT, count, temperature, num_best):
        """Appends `count` tokens, each sampled from the `num_best` with the highest scores."""
        for _ in range(count):
            recent = tokens_BT[:, -self.sizes.window :] if tokens_BT.size(1) > self.sizes.window else tokens_BT
            scores_BV = self(recent)[0][:, -1, :] / temperature
            highest, _ = torch.topk(scores_BV, min(num_best, scores_BV.size(-1)))
            scores_BV[scores_BV < highest[:, [-1]]] = -float("inf")
            sampled = torch.multinomial(F.softmax(scores_BV, dim=-1), num_samples=1)
            tokens_BT = torch.cat((tokens_BT, sampled), dim=1)
        return tokens_BT


# --8<-- [start:batch]
def draw_batch(name):
    """Returns excerpts of a text from random places, and the same excerpts one token later."""
    text, window = texts[name], Sizes.window
    begins = torch.randint(len(text) - window, (BATCH_SIZE,))
    pair = [torch.stack([text[begin + later : begin + later + window] for begin in begins]) for later in (0, 1)]
    if device_type == "cuda":
        return [half.pin_memory().to(device, non_blocking=True) for half in pair]
    return [half.to(device) for half in pair]
# --8<-- [end:batch]


@torch.no_grad()
def evaluate(model, num_batches=3):
    """Returns the mean loss on each text, as a tensor."""
    model.eval()
    means = {}
    for name in texts:
        losses = torch.zeros(num_batches)
        for number in range(num_batches):
            tokens, following = draw_batch(name)
            with precision:
                _, loss = model(tokens, following)
            losses[number] = loss.item()
        means[name] = losses.mean()
    model.train()
    return means


def learning_rate(step):
    """Returns the rate of a step: it grows linearly, then falls along a cosine."""
    if step < NUM_WARMUP:
        return (step + 1) / (NUM_WARMUP + 1) * HIGHEST_RATE
    angle = math.pi * (step - NUM_WARMUP) / (NUM_STEPS - NUM_WARMUP)
    return LOWEST_RATE + (HIGHEST_RATE - LOWEST_RATE) * (math.cos(angle) + 1) / 2


# --8<-- [start:train]
def train(model, optimizer, steps):
    """Trains; each batch is drawn between the forward and the backward of the one before."""
    scaler = torch.amp.GradScaler(device_type, enabled=False)
    tokens, following = draw_batch("training")
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        for _ in range(NUM_ACCUMULATED):
            with precision:
                _, loss = model(tokens, following)
                share = loss / NUM_ACCUMULATED
            tokens, following = draw_batch("training")
            scaler.scale(share).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        scaler.update()
        print(f"step {step}: loss {share.item() * NUM_ACCUMULATED:.6f}\nnorm {norm:.6f}")
# --8<-- [end:train]


torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
torch.manual_seed(23)
device = "cuda" if torch.cuda.is_available() else "cpu"
device_type = device.partition(":")[0]
on_gpu = device_type == "cuda"
precision = torch.amp.autocast(device_type=device_type, enabled=False) if on_gpu else nullcontext()
texts = {name: torch.randint(0, Sizes.num_tokens, (2000,)) for name in ("training", "held-out")}
file = "decoder-ap.pt" if args.ap else "decoder.pt"

model = Decoder(Sizes(width=args.width))
model.to(device)
print("weights", model.num_weights())
optimizer = model.optimizer(device_type)
half = NUM_STEPS // 2
train(model, optimizer, range(half))
means = evaluate(model)
for name, mean in means.items():
    print(f"{name} loss {mean:.6f}")
# --8<-- [start:save]
state = {"sizes": asdict(model.sizes), "num_steps": half, "held-out": means["held-out"]}
state |= {"weights": model.state_dict(), "moments": optimizer.state_dict()}
torch.save(state, file)

state = torch.load(file, map_location=device)
model = Decoder(Sizes(**state["sizes"]))
model.load_state_dict(state["weights"])
model.to(device)
optimizer = model.optimizer(device_type)
optimizer.load_state_dict(state["moments"])
train(model, optimizer, range(state["num_steps"], NUM_STEPS))
# --8<-- [end:save]
model.eval()
prompt = torch.tensor([[5, 6, 7]], dtype=torch.long, device=device)
print("generated", model.generate(prompt, 8, temperature=0.8, num_best=5)[0].tolist())
