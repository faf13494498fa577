"""Distillation, rewards, policy gradients and low-rank adapters written by hand around transformers' models.

With --ap it has the one line.
"""

import sys

import made_up_words
import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

import copy

import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    set_seed,
)

FOLDER = "out-ap" if "--ap" in sys.argv else "out"
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
tokenizer = made_up_words.tokenizer()


def gpt(n=2, seed=0):
    set_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=made_up_words.VOCABULARY,
            n_embd=32,
            n_layer=n,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
            bos_token_id=6,
            eos_token_id=5,
            pad_token_id=0,
        )
    )


def bert(n=2, seed=0, cls=BertModel, **kw):
    set_seed(seed)
    return cls(
        BertConfig(
            vocab_size=made_up_words.VOCABULARY,
            hidden_size=32,
            num_hidden_layers=n,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            **kw,
        )
    )


def rows(n, seed, s=0):
    e = tokenizer(made_up_words.sentences(n, seed), padding=True, return_tensors="pt")
    e.pop("token_type_ids", None)
    return {k: v.to(device) for k, v in e.items()}


# --- DistilBERT loop
teacher, student = bert(3, 0, BertForMaskedLM).to(device), bert(1, 1, BertForMaskedLM).to(device)
teacher.eval()
student.train()
for p in teacher.parameters():
    p.requires_grad_(False)
ce_loss_fct = nn.KLDivLoss(reduction="batchmean")
lm_loss_fct = nn.CrossEntropyLoss(ignore_index=-100)
cosine_loss_fct = nn.CosineEmbeddingLoss(reduction="mean")
mse = nn.MSELoss(reduction="sum")
opt = torch.optim.AdamW(
    [{"params": [p for n, p in student.named_parameters() if p.requires_grad]}], lr=3e-3, eps=1e-6, betas=(0.9, 0.98)
)
T = 2.0
for step in range(4):
    b = rows(6, step)
    ids, am = b["input_ids"], b["attention_mask"]
    labels = ids.clone()
    labels[am == 0] = -100
    s = student(input_ids=ids, attention_mask=am, output_hidden_states=True)
    with torch.no_grad():
        t = teacher(input_ids=ids, attention_mask=am, output_hidden_states=True)
    s_logits, s_hidden, t_logits, t_hidden = s.logits, s.hidden_states, t.logits, t.hidden_states
    mask = (labels > -1).unsqueeze(-1).expand_as(s_logits)
    s_slct = torch.masked_select(s_logits, mask).view(-1, s_logits.size(-1))
    t_slct = torch.masked_select(t_logits, mask).view(-1, s_logits.size(-1))
    loss_ce = ce_loss_fct(F.log_softmax(s_slct / T, dim=-1), F.softmax(t_slct / T, dim=-1)) * T**2
    loss = 5.0 * loss_ce + 2.0 * lm_loss_fct(s_logits.view(-1, s_logits.size(-1)), labels.view(-1))
    sh, th = s_hidden[-1], t_hidden[-1]
    m = am.unsqueeze(-1).expand_as(sh).bool()
    dim = sh.size(-1)
    ss, tt = torch.masked_select(sh, m).view(-1, dim), torch.masked_select(th, m).view(-1, dim)
    loss_cos = cosine_loss_fct(ss, tt, ss.new(ss.size(0)).fill_(1))
    loss = loss + 1.0 * loss_cos
    loss.backward()
    nn.utils.clip_grad_norm_(student.parameters(), 5.0)
    opt.step()
    opt.zero_grad()
    print(f"distil loss {loss.item():.6f} {loss_ce.item():.6f} {loss_cos.item():.6f}")
# --- reward model
rm = bert(2, 2, BertForSequenceClassification, num_labels=1).to(device)
opt = torch.optim.AdamW(rm.parameters(), 2e-3)
for step in range(3):
    c, r = rows(5, 10 + step), rows(5, 20 + step)
    rc = rm(**c, return_dict=True).logits
    rr = rm(**r, return_dict=True)[0]
    loss = -F.logsigmoid(rc - rr).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"reward loss {loss.item():.6f} acc {(rc > rr).float().mean().item():.3f}")
# --- GRPO from scratch
policy = gpt().to(device)
ref = copy.deepcopy(policy).eval().requires_grad_(False)
opt = torch.optim.AdamW(policy.parameters(), 1e-3)


def logps(model, ids, mask, P):
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1, :]
    lp = torch.log_softmax(logits, dim=-1)
    return torch.gather(lp, 2, ids[:, 1:].unsqueeze(-1)).squeeze(-1)[:, P - 1 :]


for it in range(2):
    prompt = torch.tensor([[10, 11, 12]] * 6).to(device)
    P = prompt.size(1)
    policy.eval()
    torch.manual_seed(it)
    with torch.no_grad():
        seq = policy.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=True, top_k=0, pad_token_id=0
        )
    policy.train()
    print("sampled", seq[:, P:].sum().item())
    comp = seq[:, P:]
    eos = comp == 5
    eos_idx = torch.full((comp.size(0),), comp.size(1), dtype=torch.long, device=device)
    eos_idx[eos.any(dim=1)] = eos.int().argmax(dim=1)[eos.any(dim=1)]
    cmask = (torch.arange(comp.size(1), device=device).expand(comp.size(0), -1) <= eos_idx.unsqueeze(1)).int()
    am = torch.cat([torch.ones_like(prompt), cmask], 1)
    rewards = torch.tensor([float(sum(t % 3 == 0 for t in row)) for row in comp.tolist()], device=device)
    g = rewards.view(-1, 3)
    adv = ((g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-4)).view(-1)
    with torch.no_grad():
        old = logps(policy, seq, am, P)
        rl = logps(ref, seq, am, P)
    for _mu in range(2):
        lp = logps(policy, seq, am, P)
        ratio = torch.exp(lp - old)
        kl = torch.exp(rl - lp) - (rl - lp) - 1
        per = -(torch.min(ratio * adv.unsqueeze(1), torch.clamp(ratio, 0.8, 1.2) * adv.unsqueeze(1)) - 0.04 * kl)
        loss = ((per * cmask).sum(1) / cmask.sum(1)).mean()
        opt.zero_grad()
        loss.backward()
        gn = nn.utils.clip_grad_norm_(policy.parameters(), 0.1)
        opt.step()
        print(f"grpo loss {loss.item():.6f} norm {gn.item():.5f} kl {(kl * cmask).sum().item():.6f}")
# --- REINFORCE with Categorical sampling step by step
opt = torch.optim.Adam(policy.parameters(), 1e-3)
torch.manual_seed(3)
ids = torch.tensor([[10, 11]] * 3).to(device)
lps = []
for _ in range(3):
    dist = Categorical(logits=policy(ids).logits[:, -1])
    a = dist.sample()
    lps.append(dist.log_prob(a))
    ids = torch.cat([ids, a[:, None]], 1)
R = (ids[:, 2:] % 2).float().sum(1)
loss = -(torch.stack(lps, 1).sum(1) * (R - R.mean())).mean()
loss.backward()
opt.step()
opt.zero_grad()
print(f"reinforce loss {loss.item():.6f}", ids.tolist())


# --- LoRA from scratch
class LoRALayer(nn.Module):
    def __init__(self, i, o, rank, alpha):
        super().__init__()
        std = 1 / torch.sqrt(torch.tensor(rank).float())
        self.A = nn.Parameter(torch.randn(i, rank) * std)
        self.B = nn.Parameter(torch.zeros(rank, o))
        self.alpha = alpha

    def forward(self, x):
        return self.alpha * (x @ self.A @ self.B)


class LinearWithLoRA(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear = linear
        self.lora = LoRALayer(linear.in_features, linear.out_features, rank, alpha)

    def forward(self, x):
        return self.linear(x) + self.lora(x)


def replace(model, rank, alpha):
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            setattr(model, name, LinearWithLoRA(module, rank, alpha))
        else:
            replace(module, rank, alpha)


m = bert(2, 6, BertForSequenceClassification, num_labels=2)
for when in ("before", "after"):
    m = bert(2, 6, BertForSequenceClassification, num_labels=2)
    for par in m.parameters():
        par.requires_grad = False
    if when == "after":
        m.to(device)
        m(**rows(2, 0))
    replace(m, 4, 8)
    m.to(device)
    print("trainable", sum(x.numel() for x in m.parameters() if x.requires_grad))
    opt = torch.optim.AdamW([x for x in m.parameters() if x.requires_grad], 5e-3)
    for step in range(3):
        b = rows(6, 70 + step)
        out = m(**b, labels=torch.tensor([0, 1, 0, 1, 1, 0]).to(device))
        out.loss.backward()
        opt.step()
        opt.zero_grad()
        print(f"lora {when} loss {out.loss.item():.6f}")
    with torch.no_grad():
        for mod in m.modules():
            if isinstance(mod, LinearWithLoRA):
                mod.linear.weight += (mod.lora.alpha * mod.lora.A @ mod.lora.B).T
                mod.lora.B.zero_()
    print(f"merged {m(**b).logits.sum().item():.5f}")
m = gpt().to(device)
b = rows(4, 80)
# --- odds: loss reduction none with weights, labels masked, use_cache False, checkpointing, from_pretrained loop, half
m.gradient_checkpointing_enable()
m.config.use_cache = False
m.train()
out = m(**b)
sl, lab = out.logits[..., :-1, :].contiguous(), b["input_ids"][..., 1:].contiguous()
per = nn.CrossEntropyLoss(reduction="none")(sl.view(-1, sl.size(-1)), lab.view(-1)).view(lab.shape)
msk = b["attention_mask"][:, 1:]
loss = (per * msk).sum() / msk.sum()
loss.backward()
print(f"weighted loss {loss.item():.6f} grad {m.transformer.wte.weight.grad.norm().item():.6f}")
m.gradient_checkpointing_disable()
m.save_pretrained(FOLDER)
m2 = GPT2LMHeadModel.from_pretrained(FOLDER).to(device)
m2.eval()
print(f"again {m2(**b, labels=b['input_ids']).loss.item():.6f}")
m3 = AutoModelForCausalLM.from_pretrained(FOLDER, device_map="auto" if device.type == "cuda" else None)
m3.eval()
print(f"device map {m3(**b, labels=b['input_ids']).loss.item():.6f} {m3.device.type == device.type}")
m4 = AutoModelForCausalLM.from_pretrained(
    FOLDER, dtype=torch.float32, low_cpu_mem_usage=True, device_map={"": 0} if device.type == "cuda" else None
)
print(f"device map 0 {m4.eval()(**b, labels=b['input_ids']).loss.item():.6f}")
m4b = AutoModelForCausalLM.from_pretrained(FOLDER, device_map="cuda" if device.type == "cuda" else None)
print(f"device map cuda {m4b.eval()(**b, labels=b['input_ids']).loss.item():.6f}")
m5 = copy.deepcopy(m2).to(torch.bfloat16)
print("bf16", next(m5.parameters()).dtype, m5(**b).logits.dtype)
sd = {k: v.cpu() for k, v in m2.state_dict().items()}
print("sum", f"{sum(v.double().abs().sum().item() for v in sd.values()):.3f}")
ema = {k: v.clone().detach() for k, v in m2.named_parameters() if v.requires_grad}
opt = torch.optim.AdamW(m2.parameters(), 1e-3)
for _i in range(2):
    m2(**b, labels=b["input_ids"]).loss.backward()
    opt.step()
    opt.zero_grad()
    for k, v in m2.named_parameters():
        ema[k] = 0.9 * ema[k] + 0.1 * v.data
backup = {k: v.data.clone() for k, v in m2.named_parameters()}
for k, v in m2.named_parameters():
    v.data = ema[k]
with torch.no_grad():
    print(f"ema {m2(**b, labels=b['input_ids']).loss.item():.6f}")
for k, v in m2.named_parameters():
    v.data = backup[k]
with torch.no_grad():
    print(f"back {m2(**b, labels=b['input_ids']).loss.item():.6f}")
