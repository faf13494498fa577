"""A word-level language model: an LSTM that carries its state from call to call, weights stepped by hand.

With --ap it has the one line; prints losses and sampled words.
"""

import math
import sys

import torch
import torch.nn as nn

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers):
        super().__init__()
        self.ntoken, self.nhid, self.nlayers = ntoken, nhid, nlayers
        self.encoder = nn.Embedding(ntoken, ninp)
        self.drop = nn.Dropout(0.2)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=0.2)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return nn.functional.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        shape = (self.nlayers, bsz, self.nhid)
        return weight.new_zeros(shape), weight.new_zeros(shape)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous().to(device)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def evaluate(source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(batch_size)
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, bptt):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(source) - 1)


torch.manual_seed(1111)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
batch_size, bptt, lr = 4, 7, 5.0
corpus = (torch.arange(400) * 7 + torch.randint(0, 3, (400,))) % 30
train_data, val_data = batchify(corpus[:300], batch_size), batchify(corpus[300:], batch_size)
model = RNNModel(30, 16, 24, 2).to(device)
criterion = nn.NLLLoss()
for epoch in range(2):
    model.train()
    hidden = model.init_hidden(batch_size)
    total_loss = 0.0
    for i in range(0, train_data.size(0) - 1, bptt):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        if i % (3 * bptt) == 0:
            print(f"epoch {epoch} batch {i // bptt} loss {loss.item():.6f} ppl {math.exp(loss.item()):.2f}")
    print(f"val loss {evaluate(val_data):.6f}")

with open("model-ap.pt" if "--ap" in sys.argv else "model.pt", "wb") as f:
    torch.save(model, f)
with open("model-ap.pt" if "--ap" in sys.argv else "model.pt", "rb") as f:
    model = torch.load(f, weights_only=False).to(device)
    model.rnn.flatten_parameters()
print(f"loaded loss {evaluate(val_data):.6f}")
words, hidden = [], model.init_hidden(1)
input = torch.full((1, 1), 3, dtype=torch.long, device=device)
with torch.no_grad():
    for _ in range(6):
        output, hidden = model(input, hidden)
        word_weights = output.squeeze().div(1.0).exp().cpu()
        word_idx = torch.multinomial(word_weights, 1)[0]
        input.fill_(word_idx)
        words.append(int(word_idx))
print("tokens", words)
