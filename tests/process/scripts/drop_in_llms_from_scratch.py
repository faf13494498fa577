"""A decoder is pretrained, resumed, and tuned for classes, instructions and preferences; each loss is the script's own.

With --ap it has the one line.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

import copy
import functools
import itertools
import math

from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

NUM_TOKENS, WINDOW = 101, 32
PADDING, IGNORED = 100, -100
FILE = "decoder-ap.pth" if "--ap" in sys.argv else "decoder.pth"
CONFIG = {
    "num_tokens": NUM_TOKENS,
    "window": WINDOW,
    "width": 32,
    "num_heads": 4,
    "num_layers": 2,
    "dropout": 0.1,
    "bias": False,
}


# -- the model ---------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """Layer normalization with a gain and an offset."""

    def __init__(self, width, epsilon=1e-5):
        super().__init__()
        self.epsilon = epsilon
        self.offset = nn.Parameter(torch.zeros(width))
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, states):
        centred = states - states.mean(dim=-1, keepdim=True)
        variance = states.var(dim=-1, keepdim=True, unbiased=False)
        return centred / torch.sqrt(self.epsilon + variance) * self.gain + self.offset


class TanhGelu(nn.Module):
    """GELU, approximated with a hyperbolic tangent."""

    def forward(self, states):
        slope = torch.sqrt(torch.tensor(2.0 / torch.pi))
        gate = torch.tanh((0.044715 * torch.pow(states, 3) + states) * slope)
        return (gate + 1) * states * 0.5


class CausalAttention(nn.Module):
    """Attention to earlier positions; the scores of later ones are overwritten in place."""

    def __init__(self, width, num_heads, window, dropout, bias):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("later", torch.triu(torch.ones(window, window), diagonal=1))

    def by_heads(self, layer, states_BTC):
        batch, length, _ = states_BTC.shape
        return layer(states_BTC).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, states_BTC):
        length = states_BTC.shape[1]
        query_BHTD, key_BHTD = self.by_heads(self.query, states_BTC), self.by_heads(self.key, states_BTC)
        scores_BHTT = query_BHTD @ key_BHTD.transpose(2, 3)
        scores_BHTT.masked_fill_(self.later.bool()[:length, :length], -torch.inf)
        weights_BHTT = self.dropout(torch.softmax(scores_BHTT / key_BHTD.shape[-1] ** 0.5, dim=-1))
        mixed_BTHD = (weights_BHTT @ self.by_heads(self.value, states_BTC)).transpose(1, 2)
        return self.output(mixed_BTHD.contiguous().view(states_BTC.shape))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        wide = 4 * width
        self.inner = nn.Sequential(nn.Linear(width, wide), TanhGelu(), nn.Linear(wide, width))

    def forward(self, states):
        return self.inner(states)


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward, each behind a norm of its own; both use the same dropout."""

    def __init__(self, config):
        super().__init__()
        width, dropout = config["width"], config["dropout"]
        self.dropout = nn.Dropout(dropout)
        self.attention_norm, self.feed_forward_norm = Norm(width), Norm(width)
        self.feed_forward = FeedForward(width)
        self.attention = CausalAttention(width, config["num_heads"], config["window"], dropout, config["bias"])

    def forward(self, states):
        states = self.dropout(self.attention(self.attention_norm(states))) + states
        return self.dropout(self.feed_forward(self.feed_forward_norm(states))) + states


class Decoder(nn.Module):
    """Returns scores of shape (texts, tokens, choices) for tokens of shape (texts, tokens)."""

    def __init__(self, config):
        super().__init__()
        width = config["width"]
        self.layers = nn.Sequential(*(DecoderLayer(config) for _ in range(config["num_layers"])))
        self.positions = nn.Embedding(config["window"], width)
        self.tokens = nn.Embedding(config["num_tokens"], width)
        self.norm, self.dropout = Norm(width), nn.Dropout(config["dropout"])
        self.head = nn.Linear(width, config["num_tokens"], bias=False)

    def forward(self, tokens_BT):
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        states_BTC = self.dropout(self.tokens(tokens_BT) + self.positions(positions))
        return self.head(self.norm(self.layers(states_BTC)))


# -- data, losses and updates ------------------------------------------------------------------------------------------


class Excerpts(Dataset):
    """Excerpts of a text, one from every `stride`-th token on, each with the tokens that follow its tokens."""

    def __init__(self, text, stride):
        begins = range(0, len(text) - WINDOW, stride)
        self.excerpts = [torch.tensor(text[begin : begin + WINDOW + 1]) for begin in begins]

    def __getitem__(self, index):
        excerpt = self.excerpts[index]
        return excerpt[:-1], excerpt[1:]

    def __len__(self):
        return len(self.excerpts)


def padded(rows, device):
    """Makes a batch of rows of tokens; of the padding behind a row, only the first counts, as its end."""
    longest = max(map(len, rows))
    tokens, following = [], []
    for row in rows:
        whole = torch.tensor(row + [PADDING] * (longest + 1 - len(row)))
        wanted = whole[1:].clone()
        ends = torch.nonzero(wanted == PADDING).squeeze()
        if ends.numel() > 1:
            wanted[ends[1:]] = IGNORED
        tokens.append(whole[:-1])
        following.append(wanted)
    return tuple(torch.stack(column).to(device) for column in (tokens, following))


def text_loss(model, tokens, following):
    scores = model(tokens.to(device))
    return F.cross_entropy(scores.flatten(0, 1), following.to(device).flatten())


def class_loss(model, tokens, classes):
    return F.cross_entropy(model(tokens.to(device))[:, -1, :], classes.to(device))


def mean_loss(model, loader, most):
    """Returns the mean loss of the first batches, at most `most`; not a number without any."""
    losses = [text_loss(model, *batch).item() for batch in itertools.islice(loader, most)]
    return sum(losses) / len(losses) if losses else float("nan")


def evaluate(model, *loaders):
    """Returns the mean loss for each loader, without dropout."""
    model.eval()
    with torch.no_grad():
        means = [mean_loss(model, loader, most=2) for loader in loaders]
    model.train()
    return means


def update(optimizer, loss, before_step=None):
    """Computes gradients, which must be zero before, and takes a step; returns the loss."""
    loss.backward()
    if before_step is not None:
        before_step()
    optimizer.step()
    return loss


# -- generation --------------------------------------------------------------------------------------------------------


def generate_best(model, tokens, count):
    """Appends `count` tokens, each the one with the highest score."""
    window = model.positions.weight.shape[0]
    while count:
        with torch.no_grad():
            scores = model(tokens[:, -window:])[:, -1, :]
        best = torch.argmax(torch.softmax(scores, dim=-1), dim=-1, keepdim=True)
        tokens = torch.cat((tokens, best), dim=1)
        count -= 1
    return tokens


def generate_sampled(model, tokens, count, temperature, num_best, end=None):
    """Appends up to `count` tokens, each sampled from the `num_best` with the highest scores, until `end` is."""
    for _ in range(count):
        with torch.no_grad():
            scores = model(tokens[:, -WINDOW:])[:, -1, :]
        lowest = torch.topk(scores, num_best)[0][:, -1]
        excluded = torch.tensor(float("-inf")).to(scores.device)
        scores = torch.where(scores < lowest, excluded, scores)
        sampled = torch.multinomial(torch.softmax(scores / temperature, dim=-1), num_samples=1)
        if sampled == end:
            break
        tokens = torch.cat((tokens, sampled), dim=1)
    return tokens


# -- stages of training ------------------------------------------------------------------------------------------------


def pretrain(model, training, held_out):
    """Trains for one epoch with a learning rate set by hand, then generates; returns the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, lr=0.004)
    lowest, first, highest = 1e-6, 3e-5, optimizer.param_groups[0]["lr"]
    num_warmup, num_tokens = 2, 0
    clip = functools.partial(nn.utils.clip_grad_norm_, model.parameters(), max_norm=1.0)
    model.train()
    for number, (tokens, following) in enumerate(training):
        optimizer.zero_grad()
        warm = number >= num_warmup
        if warm:
            angle = math.pi * (number - num_warmup) / (len(training) - num_warmup)
            rate = lowest + (math.cos(angle) + 1) * 0.5 * (highest - lowest)
        else:
            rate = first + (highest - first) / num_warmup * number
        for group in optimizer.param_groups:
            group["lr"] = rate
        update(optimizer, text_loss(model, tokens, following), before_step=clip if warm else None)
        num_tokens += tokens.numel()
        if number % 3 == 0:
            means = evaluate(model, training, held_out)
            print(f"after {num_tokens} tokens: training loss {means[0]:.5f}, held-out loss {means[1]:.5f}")
    model.eval()
    prompt = torch.tensor([4, 5, 6]).unsqueeze(0).to(device)
    with torch.no_grad():
        print("generated", generate_best(model, prompt, 10).squeeze(0).tolist())
    model.train()
    return optimizer


def resume(model, optimizer, training):
    """Saves both and loads them into new ones; returns the new model after one step."""
    torch.save({"weights": model.state_dict(), "moments": optimizer.state_dict()}, FILE)
    state = torch.load(FILE, weights_only=True)
    model = Decoder(CONFIG)
    model.load_state_dict(state["weights"])
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, lr=5e-4)
    optimizer.load_state_dict(state["moments"])
    model.train()
    for batch in training:
        optimizer.zero_grad()
        print(f"resumed loss {update(optimizer, text_loss(model, *batch)).item():.5f}")
        break
    return model


def print_probabilities(model):
    """Picks tokens with lists of indices; prints their log-probabilities and perplexity."""
    with torch.no_grad():
        scores = model(torch.randint(0, NUM_TOKENS, (2, 3), generator=source).to(device))
    logs = torch.log(torch.softmax(scores, dim=-1)[0, [0, 1, 2], [9, 8, 7]])
    perplexity = torch.exp(torch.mean(logs) * -1).item()
    print("log-probabilities", [round(log, 4) for log in logs.tolist()], f"perplexity {perplexity:.3f}")


def tune_for_classes(model):
    """Freezes the model but for its last layer and norm, and trains these with a new head for two classes."""
    for weight in model.parameters():
        weight.requires_grad = False
    torch.manual_seed(41)
    model.head = nn.Linear(in_features=CONFIG["width"], out_features=2)
    model.to(device)
    for part in (model.layers[-1], model.norm):
        for weight in part.parameters():
            weight.requires_grad = True
    texts = torch.randint(0, NUM_TOKENS, (24, 20), generator=source)
    classes = texts[:, -1].gt(NUM_TOKENS // 2).long()
    loader = DataLoader(list(zip(texts, classes)), shuffle=True, batch_size=6)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, lr=5e-3)
    for _ in range(2):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            print(f"class loss {update(optimizer, class_loss(model, *batch)).item():.5f}")
        print(f"accuracy {accuracy(model, loader):.4f}")


def accuracy(model, loader):
    model.eval()
    num_correct = num_texts = 0
    for texts, classes in loader:
        texts, classes = texts.to(device), classes.to(device)
        with torch.no_grad():
            predicted = torch.argmax(model(texts)[:, -1, :], dim=-1)
        num_correct += (predicted == classes).sum().item()
        num_texts += predicted.shape[0]
    return num_correct / num_texts


def tune_for_instructions():
    """Trains a new model on rows of many lengths, which the loader's collate function puts on the device."""
    lengths = torch.randint(5, 20, (16,), generator=source)
    rows = [torch.randint(0, PADDING, (int(length),), generator=source).tolist() for length in lengths]
    torch.manual_seed(43)
    model = Decoder(CONFIG).to(device)
    collate = functools.partial(padded, device=device)
    loader = DataLoader(rows, collate_fn=collate, batch_size=4, shuffle=True, drop_last=True, num_workers=0)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, lr=5e-3)
    with torch.no_grad():
        print(f"before instructions {mean_loss(model, loader, most=2):.5f}")
    for batch in loader:
        optimizer.zero_grad()
        print(f"instruction loss {update(optimizer, text_loss(model, *batch)).item():.5f}")
    return model


def tune_for_preferences(model):
    """Direct preference optimization: trains towards the better of two answers, relative to a copy of the model."""
    reference = copy.deepcopy(model)
    reference.eval()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, lr=5e-3)
    for _ in range(4):
        answers = [made_up_answers() for _ in ("better", "worse")]
        optimizer.zero_grad()
        better, worse = (log_probability(model, *answer) for answer in answers)
        with torch.no_grad():
            better_before, worse_before = (log_probability(reference, *answer) for answer in answers)
        gap = (better - worse) - (better_before - worse_before)
        gains = [(better - better_before).detach().mean(), (worse - worse_before).detach().mean()]
        loss = -F.logsigmoid(0.1 * gap).mean()
        loss.backward()
        optimizer.step()
        print(f"preference loss {loss.item():.6f}", *(f"{gain.item():.5f}" for gain in gains))
        print(f"margin {(gains[0] - gains[1]).item():.5f}")


def log_probability(model, tokens, counted):
    """Returns for each row the mean log-probability of the tokens that are `counted`, given those before them."""
    logs = F.log_softmax(model(tokens)[:, :-1, :], dim=-1)
    picked = torch.gather(input=logs, dim=-1, index=tokens[:, 1:].clone().unsqueeze(-1)).squeeze(-1)
    counted = counted[:, 1:].clone()
    return (picked * counted).sum(-1) / counted.sum(-1)


def made_up_answers():
    """Returns four rows of tokens, and which of them count: those after the fifth, in one row only up to the tenth."""
    tokens = torch.randint(0, PADDING, (4, 14), generator=source)
    counted = torch.ones(4, 14).bool()
    counted[:, :5] = False
    counted[1, 10:] = False
    return tokens.to(device), counted.to(device)


torch.manual_seed(37)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
source = torch.Generator().manual_seed(2)
text = torch.randint(0, NUM_TOKENS, (600,), generator=source).tolist()
training = DataLoader(Excerpts(text[:500], stride=16), batch_size=4, num_workers=0, shuffle=True, drop_last=True)
held_out = DataLoader(Excerpts(text[500:], stride=WINDOW), batch_size=4, num_workers=0, shuffle=False, drop_last=False)
model = Decoder(CONFIG)
model.to(device)
model = resume(model, pretrain(model, training, held_out), training)
torch.manual_seed(37)
prompt = torch.tensor([[4, 5, 6]]).to(device)
print("sampled", generate_sampled(model, prompt, 6, temperature=1.4, num_best=25)[0].tolist())
print_probabilities(model)
tune_for_classes(model)
tune_for_preferences(tune_for_instructions())
