"""Models that a user would write without a library: for the matrix of families and plans; small, without dropout.

Decides what the user's own models look like. Must not know plans, batches or how anything is compared.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OwnBlock(nn.Module):
    """Pre-norm block with PyTorch's fused attention module, boolean masks, and a GELU feed-forward."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(hidden)
        self.attention = nn.MultiheadAttention(hidden, heads, batch_first=True)
        self.norm_feed_forward = nn.LayerNorm(hidden)
        self.feed_forward = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x_BTH: Tensor, padding_BT: Tensor, future_TT: Tensor) -> Tensor:
        normed_BTH = self.norm_attention(x_BTH)
        attended_BTH, _ = self.attention(
            normed_BTH, normed_BTH, normed_BTH, key_padding_mask=padding_BT, attn_mask=future_TT, need_weights=False
        )
        x_BTH = x_BTH + attended_BTH
        return x_BTH + self.feed_forward(self.norm_feed_forward(x_BTH))


class OwnTransformer(nn.Module):
    """A causal transformer with tied embedding and head, learned positions and a buffer; gives logits."""

    def __init__(self, vocabulary: int, hidden: int = 64, heads: int = 4, blocks: int = 4, positions: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Parameter(0.02 * torch.randn(positions, hidden))
        self.blocks = nn.ModuleList(OwnBlock(hidden, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.register_buffer("future", torch.ones(positions, positions, dtype=torch.bool).triu(1))

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        length = ids_BT.shape[1]
        x_BTH = self.tokens(ids_BT) + self.positions[:length]
        for block in self.blocks:
            x_BTH = block(x_BTH, mask_BT == 0, self.future[:length, :length])
        return self.head(self.norm(x_BTH))


class CausalSelfAttention(nn.Module):
    """nanoGPT's attention: one projection for q, k and v, split along the last dim."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)
        self.n_head, self.n_embd = heads, hidden

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    """nanoGPT's feed-forward."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(hidden, 4 * hidden)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    """nanoGPT's block."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = CausalSelfAttention(hidden, heads)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT: `GPT(idx, targets)` gives (logits, loss); blocks in a ModuleDict, tied weights, -1 is ignored.

    Source: https://github.com/karpathy/nanoGPT, `model.py`; the structure and the names.
    """

    def __init__(self, vocabulary: int, hidden: int = 64, heads: int = 4, blocks: int = 4, positions: int = 32) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, hidden),
                "wpe": nn.Embedding(positions, hidden),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([Block(hidden, heads) for _ in range(blocks)]),
                "ln_f": nn.LayerNorm(hidden),
            }
        )
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.1)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self, weight_decay: float, learning_rate: float) -> torch.optim.Optimizer:
        """nanoGPT's two groups: matrices decay, vectors do not."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-6)


class ConvNet(nn.Module):
    """The convolutional network of PyTorch's MNIST example, smaller; gives log-probabilities.

    Args:
        normalise: With batch normalisation, whose rows look at each other.
    """

    def __init__(self, normalise: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, bias=not normalise)
        self.norm1 = nn.BatchNorm2d(8) if normalise else nn.Identity()
        self.conv2 = nn.Conv2d(8, 16, 3, bias=not normalise)
        self.norm2 = nn.BatchNorm2d(16) if normalise else nn.Identity()
        self.fc1 = nn.Linear(16 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)
