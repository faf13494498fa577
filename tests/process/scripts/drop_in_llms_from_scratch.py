"""A GPT from a textbook: pretraining, classification, instructions, preferences; every loss is the script's own.

With --ap it has the one line.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

import copy
import math
from functools import partial

import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class MultiHeadAttention(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x):
        b, num_tokens, _d_in = x.shape
        keys = self.W_key(x)
        queries = self.W_query(x)
        values = self.W_value(x)
        keys = keys.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        values = values.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        queries = queries.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        attn_scores = queries @ keys.transpose(2, 3)
        mask_bool = self.mask.bool()[:num_tokens, :num_tokens]
        attn_scores.masked_fill_(mask_bool, -torch.inf)
        attn_weights = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1)
        attn_weights = self.dropout(attn_weights)
        context_vec = (attn_weights @ values).transpose(1, 2)
        context_vec = context_vec.contiguous().view(b, num_tokens, self.d_out)
        return self.out_proj(context_vec)


class LayerNorm(nn.Module):
    def __init__(self, emb_dim):
        super().__init__()
        self.eps = 1e-5
        self.scale = nn.Parameter(torch.ones(emb_dim))
        self.shift = nn.Parameter(torch.zeros(emb_dim))

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        var = x.var(dim=-1, keepdim=True, unbiased=False)
        norm_x = (x - mean) / torch.sqrt(var + self.eps)
        return self.scale * norm_x + self.shift


class GELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class FeedForward(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(cfg["emb_dim"], 4 * cfg["emb_dim"]), GELU(), nn.Linear(4 * cfg["emb_dim"], cfg["emb_dim"])
        )

    def forward(self, x):
        return self.layers(x)


class TransformerBlock(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.att = MultiHeadAttention(
            cfg["emb_dim"], cfg["emb_dim"], cfg["context_length"], cfg["drop_rate"], cfg["n_heads"], cfg["qkv_bias"]
        )
        self.ff = FeedForward(cfg)
        self.norm1 = LayerNorm(cfg["emb_dim"])
        self.norm2 = LayerNorm(cfg["emb_dim"])
        self.drop_shortcut = nn.Dropout(cfg["drop_rate"])

    def forward(self, x):
        shortcut = x
        x = self.norm1(x)
        x = self.att(x)
        x = self.drop_shortcut(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.ff(x)
        x = self.drop_shortcut(x)
        return x + shortcut


class GPTModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok_emb = nn.Embedding(cfg["vocab_size"], cfg["emb_dim"])
        self.pos_emb = nn.Embedding(cfg["context_length"], cfg["emb_dim"])
        self.drop_emb = nn.Dropout(cfg["drop_rate"])
        self.trf_blocks = nn.Sequential(*[TransformerBlock(cfg) for _ in range(cfg["n_layers"])])
        self.final_norm = LayerNorm(cfg["emb_dim"])
        self.out_head = nn.Linear(cfg["emb_dim"], cfg["vocab_size"], bias=False)

    def forward(self, in_idx):
        _batch_size, seq_len = in_idx.shape
        tok_embeds = self.tok_emb(in_idx)
        pos_embeds = self.pos_emb(torch.arange(seq_len, device=in_idx.device))
        x = tok_embeds + pos_embeds
        x = self.drop_emb(x)
        x = self.trf_blocks(x)
        x = self.final_norm(x)
        return self.out_head(x)


def generate_text_simple(model, idx, max_new_tokens, context_size):
    for _ in range(max_new_tokens):
        idx_cond = idx[:, -context_size:]
        with torch.no_grad():
            logits = model(idx_cond)
        logits = logits[:, -1, :]
        probas = torch.softmax(logits, dim=-1)
        idx_next = torch.argmax(probas, dim=-1, keepdim=True)
        idx = torch.cat((idx, idx_next), dim=1)
    return idx


def generate(model, idx, max_new_tokens, context_size, temperature=0.0, top_k=None, eos_id=None):
    for _ in range(max_new_tokens):
        idx_cond = idx[:, -context_size:]
        with torch.no_grad():
            logits = model(idx_cond)
        logits = logits[:, -1, :]
        if top_k is not None:
            top_logits, _ = torch.topk(logits, top_k)
            min_val = top_logits[:, -1]
            logits = torch.where(logits < min_val, torch.tensor(float("-inf")).to(logits.device), logits)
        if temperature > 0.0:
            logits = logits / temperature
            probs = torch.softmax(logits, dim=-1)
            idx_next = torch.multinomial(probs, num_samples=1)
        else:
            idx_next = torch.argmax(logits, dim=-1, keepdim=True)
        if idx_next == eos_id:
            break
        idx = torch.cat((idx, idx_next), dim=1)
    return idx


class GPTDatasetV1(Dataset):
    def __init__(self, token_ids, max_length, stride):
        self.input_ids = []
        self.target_ids = []
        for i in range(0, len(token_ids) - max_length, stride):
            self.input_ids.append(torch.tensor(token_ids[i : i + max_length]))
            self.target_ids.append(torch.tensor(token_ids[i + 1 : i + max_length + 1]))

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, idx):
        return self.input_ids[idx], self.target_ids[idx]


def calc_loss_batch(input_batch, target_batch, model, device):
    input_batch, target_batch = input_batch.to(device), target_batch.to(device)
    logits = model(input_batch)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target_batch.flatten())


def calc_loss_loader(data_loader, model, device, num_batches=None, fn=calc_loss_batch):
    total_loss = 0.0
    if len(data_loader) == 0:
        return float("nan")
    if num_batches is None:
        num_batches = len(data_loader)
    else:
        num_batches = min(num_batches, len(data_loader))
    for i, (input_batch, target_batch) in enumerate(data_loader):
        if i < num_batches:
            loss = fn(input_batch, target_batch, model, device)
            total_loss += loss.item()
        else:
            break
    return total_loss / num_batches


def evaluate_model(model, train_loader, val_loader, device, eval_iter):
    model.eval()
    with torch.no_grad():
        train_loss = calc_loss_loader(train_loader, model, device, num_batches=eval_iter)
        val_loss = calc_loss_loader(val_loader, model, device, num_batches=eval_iter)
    model.train()
    return train_loss, val_loss


def generate_and_print_sample(model, device, start_context):
    model.eval()
    context_size = model.pos_emb.weight.shape[0]
    encoded = torch.tensor(start_context).unsqueeze(0).to(device)
    with torch.no_grad():
        token_ids = generate_text_simple(model=model, idx=encoded, max_new_tokens=10, context_size=context_size)
    print(token_ids.squeeze(0).tolist())
    model.train()


GPT_CONFIG = {
    "vocab_size": 101,
    "context_length": 32,
    "emb_dim": 32,
    "n_heads": 4,
    "n_layers": 2,
    "drop_rate": 0.1,
    "qkv_bias": False,
}
torch.manual_seed(123)
model = GPTModel(GPT_CONFIG)
CHECKPOINT = "gpt-ap.pth" if "--ap" in sys.argv else "gpt.pth"
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.004, weight_decay=0.1)
g = torch.Generator().manual_seed(1)
tokens = torch.randint(0, 101, (600,), generator=g).tolist()
train_loader = DataLoader(GPTDatasetV1(tokens[:500], 32, 16), batch_size=4, shuffle=True, drop_last=True, num_workers=0)
val_loader = DataLoader(GPTDatasetV1(tokens[500:], 32, 32), batch_size=4, shuffle=False, drop_last=False, num_workers=0)
train_losses, val_losses, track_tokens_seen = [], [], []
tokens_seen, global_step = 0, -1
initial_lr, min_lr, peak_lr = 3e-5, 1e-6, optimizer.param_groups[0]["lr"]
track_lrs = []
total_training_steps = len(train_loader) * 1
warmup_steps = 2
lr_increment = (peak_lr - initial_lr) / warmup_steps
for epoch in range(1):
    model.train()
    for input_batch, target_batch in train_loader:
        optimizer.zero_grad()
        global_step += 1
        if global_step < warmup_steps:
            lr = initial_lr + global_step * lr_increment
        else:
            progress = (global_step - warmup_steps) / (total_training_steps - warmup_steps)
            lr = min_lr + (peak_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        track_lrs.append(lr)
        loss = calc_loss_batch(input_batch, target_batch, model, device)
        loss.backward()
        if global_step >= warmup_steps:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        tokens_seen += input_batch.numel()
        if global_step % 3 == 0:
            train_loss, val_loss = evaluate_model(model, train_loader, val_loader, device, 2)
            train_losses.append(train_loss)
            val_losses.append(val_loss)
            track_tokens_seen.append(tokens_seen)
            print(f"Ep {epoch + 1} (Iter {global_step:06d}): Train loss {train_loss:.3f}, Val loss {val_loss:.3f}")
    generate_and_print_sample(model, device, [1, 2, 3])
torch.save({"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, CHECKPOINT)
checkpoint = torch.load(CHECKPOINT, weights_only=True)
model = GPTModel(GPT_CONFIG)
model.load_state_dict(checkpoint["model_state_dict"])
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)
optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
model.train()
for b in train_loader:
    optimizer.zero_grad()
    loss = calc_loss_batch(*b, model, device)
    loss.backward()
    optimizer.step()
    print(f"resumed loss {loss.item():.5f}")
    break
torch.manual_seed(123)
print(generate(model, torch.tensor([[1, 2, 3]]).to(device), 6, 32, temperature=1.4, top_k=25)[0].tolist())
# perplexity and probas
with torch.no_grad():
    inp = torch.randint(0, 101, (2, 3), generator=g).to(device)
    logits = model(inp)
probas = torch.softmax(logits, dim=-1)
tp = probas[0, [0, 1, 2], [3, 4, 5]]
print(
    "log probas",
    [round(v, 4) for v in torch.log(tp).tolist()],
    f"{torch.exp(torch.mean(torch.log(tp)) * -1).item():.3f}",
)
# ch06
for param in model.parameters():
    param.requires_grad = False
torch.manual_seed(123)
num_classes = 2
model.out_head = torch.nn.Linear(in_features=GPT_CONFIG["emb_dim"], out_features=num_classes)
model.to(device)
for param in model.trf_blocks[-1].parameters():
    param.requires_grad = True
for param in model.final_norm.parameters():
    param.requires_grad = True


def calc_cls_batch(input_batch, target_batch, model, device):
    input_batch, target_batch = input_batch.to(device), target_batch.to(device)
    logits = model(input_batch)[:, -1, :]
    return torch.nn.functional.cross_entropy(logits, target_batch)


def calc_accuracy_loader(data_loader, model, device, num_batches=None):
    model.eval()
    correct_predictions, num_examples = 0, 0
    for _i, (input_batch, target_batch) in enumerate(data_loader):
        input_batch, target_batch = input_batch.to(device), target_batch.to(device)
        with torch.no_grad():
            logits = model(input_batch)[:, -1, :]
        predicted_labels = torch.argmax(logits, dim=-1)
        num_examples += predicted_labels.shape[0]
        correct_predictions += (predicted_labels == target_batch).sum().item()
    return correct_predictions / num_examples


X = torch.randint(0, 101, (24, 20), generator=g)
Y = (X[:, -1] > 50).long()
cls_loader = DataLoader(list(zip(X, Y)), batch_size=6, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
for _ in range(2):
    model.train()
    for xb, yb in cls_loader:
        optimizer.zero_grad()
        loss = calc_cls_batch(xb, yb, model, device)
        loss.backward()
        optimizer.step()
        print(f"cls loss {loss.item():.5f}")
    print(f"acc {calc_accuracy_loader(cls_loader, model, device):.4f}")


# ch07 instruction
def custom_collate_fn(batch, pad_token_id=100, ignore_index=-100, allowed_max_length=None, device="cpu"):
    batch_max_length = max(len(item) + 1 for item in batch)
    inputs_lst, targets_lst = [], []
    for item in batch:
        new_item = item.copy()
        new_item += [pad_token_id]
        padded = new_item + [pad_token_id] * (batch_max_length - len(new_item))
        inputs = torch.tensor(padded[:-1])
        targets = torch.tensor(padded[1:])
        mask = targets == pad_token_id
        indices = torch.nonzero(mask).squeeze()
        if indices.numel() > 1:
            targets[indices[1:]] = ignore_index
        inputs_lst.append(inputs)
        targets_lst.append(targets)
    return torch.stack(inputs_lst).to(device), torch.stack(targets_lst).to(device)


collate = partial(custom_collate_fn, device=device, allowed_max_length=32)
rows = [torch.randint(0, 100, (int(n),), generator=g).tolist() for n in torch.randint(5, 20, (16,), generator=g)]
torch.manual_seed(123)
loader = DataLoader(rows, batch_size=4, collate_fn=collate, shuffle=True, drop_last=True, num_workers=0)
policy = GPTModel(GPT_CONFIG).to(device)
optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3, weight_decay=0.1)
with torch.no_grad():
    print(f"sft before {calc_loss_loader(loader, policy, device, 2):.5f}")
for xb, yb in loader:
    optimizer.zero_grad()
    loss = calc_loss_batch(xb, yb, policy, device)
    loss.backward()
    optimizer.step()
    print(f"sft loss {loss.item():.5f}")
# DPO
reference_model = copy.deepcopy(policy)
reference_model.eval()


def compute_dpo_loss(
    model_chosen_logprobs, model_rejected_logprobs, reference_chosen_logprobs, reference_rejected_logprobs, beta=0.1
):
    model_logratios = model_chosen_logprobs - model_rejected_logprobs
    reference_logratios = reference_chosen_logprobs - reference_rejected_logprobs
    logits = model_logratios - reference_logratios
    losses = -F.logsigmoid(beta * logits)
    chosen_rewards = (model_chosen_logprobs - reference_chosen_logprobs).detach()
    rejected_rewards = (model_rejected_logprobs - reference_rejected_logprobs).detach()
    return losses.mean(), chosen_rewards.mean(), rejected_rewards.mean()


def compute_logprobs(logits, labels, selection_mask=None):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    log_probs = F.log_softmax(logits, dim=-1)
    selected_log_probs = torch.gather(input=log_probs, dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)
    if selection_mask is not None:
        mask = selection_mask[:, 1:].clone()
        selected_log_probs = selected_log_probs * mask
        return selected_log_probs.sum(-1) / mask.sum(-1)
    return selected_log_probs.mean(-1)


def compute_dpo_loss_batch(batch, policy_model, reference_model, beta):
    p_c = compute_logprobs(policy_model(batch["chosen"]), batch["chosen"], batch["chosen_mask"])
    p_r = compute_logprobs(policy_model(batch["rejected"]), batch["rejected"], batch["rejected_mask"])
    with torch.no_grad():
        r_c = compute_logprobs(reference_model(batch["chosen"]), batch["chosen"], batch["chosen_mask"])
        r_r = compute_logprobs(reference_model(batch["rejected"]), batch["rejected"], batch["rejected_mask"])
    return compute_dpo_loss(p_c, p_r, r_c, r_r, beta=beta)


optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3, weight_decay=0.01)
for _step in range(4):
    batch = {}
    for name in ("chosen", "rejected"):
        ids = torch.randint(0, 100, (4, 14), generator=g)
        m = torch.ones(4, 14).bool()
        m[:, :5] = False
        m[1, 10:] = False
        batch[name] = ids.to(device)
        batch[name + "_mask"] = m.to(device)
    optimizer.zero_grad()
    loss, cr, rr = compute_dpo_loss_batch(batch, policy, reference_model, 0.1)
    loss.backward()
    optimizer.step()
    print(f"dpo loss {loss.item():.6f} {cr.item():.5f} {rr.item():.5f} margin {(cr - rr).item():.5f}")
