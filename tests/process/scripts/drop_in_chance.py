"""Models whose forward draws what it does next: teacher forcing, SpecAugment, layers that are dropped, few experts.

With --ap it has the one line.
"""

import random
import sys

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

from transformers import (
    MarianConfig,
    MarianMTModel,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
    set_seed,
)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Encoder(nn.Module):
    def __init__(self, input_dim, emb_dim, hid_dim, n_layers, dropout):
        super().__init__()
        self.embedding = nn.Embedding(input_dim, emb_dim)
        self.rnn = nn.LSTM(emb_dim, hid_dim, n_layers, dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, src):
        _outputs, (hidden, cell) = self.rnn(self.dropout(self.embedding(src)))
        return hidden, cell


class Decoder(nn.Module):
    def __init__(self, output_dim, emb_dim, hid_dim, n_layers, dropout):
        super().__init__()
        self.output_dim = output_dim
        self.embedding = nn.Embedding(output_dim, emb_dim)
        self.rnn = nn.LSTM(emb_dim, hid_dim, n_layers, dropout=dropout)
        self.fc_out = nn.Linear(hid_dim, output_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input, hidden, cell):
        embedded = self.dropout(self.embedding(input.unsqueeze(0)))
        output, (hidden, cell) = self.rnn(embedded, (hidden, cell))
        return self.fc_out(output.squeeze(0)), hidden, cell


class Seq2Seq(nn.Module):
    """Sequence to sequence with teacher forcing, time first."""

    def __init__(self, encoder, decoder, device):
        super().__init__()
        self.encoder, self.decoder, self.device = encoder, decoder, device

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        trg_len, batch_size = trg.shape
        outputs = torch.zeros(trg_len, batch_size, self.decoder.output_dim).to(self.device)
        hidden, cell = self.encoder(src)
        input = trg[0, :]
        for t in range(1, trg_len):
            output, hidden, cell = self.decoder(input, hidden, cell)
            outputs[t] = output
            teacher_force = random.random() < teacher_forcing_ratio
            top1 = output.argmax(1)
            input = trg[t] if teacher_force else top1
        return outputs


class Speller(nn.Module):
    """The same with the batch first, and a scale drawn from numpy."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(40, 16)
        self.cell = nn.GRUCell(16, 16)
        self.out = nn.Linear(16, 40)

    def forward(self, x, ratio=0.5):
        h = torch.zeros(x.shape[0], 16, device=x.device)
        token, outputs = x[:, 0], []
        for t in range(1, x.shape[1]):
            h = self.cell(self.emb(token), h)
            outputs.append(self.out(h))
            token = x[:, t] if random.random() < ratio else outputs[-1].argmax(1)
        logits = torch.stack(outputs, 1)
        return logits * np.random.uniform(0.5, 1.0) if self.training and np.random.rand() < 0.5 else logits


class SparseMoE(nn.Module):
    """Experts that only run if a token goes to them."""

    def __init__(self, dim=32, num_experts=6, top_k=2):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 48), nn.SiLU(), nn.Linear(48, dim)) for _ in range(num_experts)
        )
        self.top_k = top_k

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        weights, chosen = F.softmax(self.gate(flat), -1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(flat[token]) * weights[token, place].unsqueeze(-1))
        return out.view(x.shape)


def seq2seq():
    model = Seq2Seq(Encoder(40, 16, 24, 2, 0.5), Decoder(44, 16, 24, 2, 0.5), device).to(device)
    for param in model.parameters():
        nn.init.uniform_(param.data, -0.08, 0.08)
    optimizer = optim.Adam(model.parameters())
    criterion = nn.CrossEntropyLoss(ignore_index=1)
    for _ in range(4):
        src, trg = torch.randint(2, 40, (7, 6)).to(device), torch.randint(2, 44, (8, 6)).to(device)
        optimizer.zero_grad()
        output = model(src, trg)
        loss = criterion(output[1:].view(-1, output.shape[-1]), trg[1:].view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        print(f"seq2seq loss {loss.item():.5f}")


def speller():
    model = Speller().to(device)
    optimizer = optim.Adam(model.parameters(), 1e-2)
    for _ in range(5):
        x = torch.randint(0, 40, (6, 7)).to(device)
        loss = F.cross_entropy(model(x).reshape(-1, 40), x[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"speller loss {loss.item():.5f}, the script draws {random.randint(0, 1000)}")


def experts():
    embedding, layer, head = nn.Embedding(50, 32), SparseMoE(), nn.Linear(32, 50)
    model = nn.Sequential(embedding, layer, head).to(device)
    optimizer = optim.AdamW(model.parameters(), 3e-3)
    for _ in range(5):
        x = torch.randint(0, 50, (4, 2))
        loss = F.cross_entropy(model(x.to(device)).view(-1, 50), x.roll(-1, 1).to(device).view(-1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"experts loss {loss.item():.5f} norm {norm.item():.5f}")


def train(name, model, make_batch, steps=4):
    model.to(device).train()
    optimizer = optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    for _ in range(steps):
        batch = make_batch()
        loss = model(**{key: value.to(device) for key, value in batch.items()}).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"{name} loss {loss.item():.5f} norm {norm.item():.5f}")


SMALL = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}


def wav2vec2():
    config = Wav2Vec2Config(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(4, 4),
        conv_kernel=(8, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.3,
        mask_time_length=2,
        ctc_loss_reduction="mean",
        pad_token_id=0,
    )
    model = Wav2Vec2ForCTC(config)
    model.freeze_feature_encoder()
    train("wav2vec2", model, lambda: {"input_values": torch.randn(4, 400), "labels": torch.randint(1, 20, (4, 6))})


def whisper():
    config = WhisperConfig(
        **SMALL,
        **HEADS,
        vocab_size=60,
        num_mel_bins=16,
        max_source_positions=20,
        max_target_positions=20,
        apply_spec_augment=True,
        mask_time_prob=0.3,
        mask_time_length=3,
        decoder_layerdrop=0.3,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = WhisperForConditionalGeneration(config)
    train("whisper", model, lambda: {"input_features": torch.randn(4, 16, 40), "labels": torch.randint(3, 60, (4, 6))})


def marian():
    config = MarianConfig(
        **SMALL,
        **HEADS,
        vocab_size=60,
        max_position_embeddings=32,
        pad_token_id=0,
        decoder_start_token_id=0,
        encoder_layerdrop=0.3,
        decoder_layerdrop=0.3,
    )
    ids = [torch.randint(1, 60, (4, 7)) for _ in range(4)]
    train("marian", MarianMTModel(config), lambda: {"input_ids": ids[0], "labels": ids.pop()})


for part in (seq2seq, speller, experts, wav2vec2, whisper, marian):
    set_seed(1234)
    part()
    print(f"then {random.random():.6f} {np.random.rand():.6f} {torch.rand(1).item():.6f}")
