"""Recurrent models called step by step: an encoder and a decoder with attention, characters, a sine by LBFGS.

With --ap it has the one line; prints losses and what is generated.
"""

import random
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
SOS, EOS, MAX_LENGTH = 0, 1, 6

# -- translation with attention, one call a word -----------------------------------------------------------------------


class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.embedding, self.gru = nn.Embedding(input_size, hidden_size), nn.GRU(hidden_size, hidden_size)

    def forward(self, input, hidden):
        return self.gru(self.embedding(input).view(1, 1, -1), hidden)

    def initHidden(self):
        return torch.zeros(1, 1, self.hidden_size, device=device)


class AttnDecoderRNN(nn.Module):
    def __init__(self, h, output_size):
        super().__init__()
        self.embedding, self.gru, self.out = nn.Embedding(output_size, h), nn.GRU(h, h), nn.Linear(h, output_size)
        self.attn, self.attn_combine = nn.Linear(h * 2, MAX_LENGTH), nn.Linear(h * 2, h)

    def forward(self, input, hidden, encoder_outputs):
        embedded = self.embedding(input).view(1, 1, -1)
        weights = F.softmax(self.attn(torch.cat((embedded[0], hidden[0]), 1)), dim=1)
        applied = torch.bmm(weights.unsqueeze(0), encoder_outputs.unsqueeze(0))
        output = F.relu(self.attn_combine(torch.cat((embedded[0], applied[0]), 1)).unsqueeze(0))
        output, hidden = self.gru(output, hidden)
        return F.log_softmax(self.out(output[0]), dim=1), hidden, weights


encoder, decoder = EncoderRNN(20, 12).to(device), AttnDecoderRNN(12, 22).to(device)
optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (encoder, decoder)]
for iteration in range(3):
    words, target = torch.randint(2, 20, (5, 1), device=device), torch.randint(2, 22, (4, 1), device=device)
    hidden, outputs, loss = encoder.initHidden(), torch.zeros(MAX_LENGTH, 12, device=device), 0
    for optimizer in optimizers:
        optimizer.zero_grad()
    for i in range(5):
        output, hidden = encoder(words[i], hidden)
        outputs[i] = output[0, 0]
    given = torch.tensor([[SOS]], device=device)
    for i in range(4):
        output, hidden, _ = decoder(given, hidden, outputs)
        loss += F.nll_loss(output, target[i])
        given = target[i] if iteration % 2 else output.topk(1)[1].squeeze().detach()
        if given.item() == EOS:
            break
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    print(f"attention loss {loss.item() / 4:.6f}")

# -- characters --------------------------------------------------------------------------------------------------------


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(20, 12), nn.LSTM(12, 12, 2), nn.Linear(12, 20)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input).view(1, input.size(0), -1), hidden)
        return self.decoder(output.view(input.size(0), -1)), hidden

    def init_hidden(self, rows):
        weight = next(self.parameters()).data
        return tuple(weight.new(2, rows, 12).zero_() for _ in range(2))


model = CharRNN().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
hidden = model.init_hidden(4)
for _ in range(3):
    chunk = torch.randint(0, 20, (4, 6)).to(device)
    hidden = tuple(h.detach() for h in hidden)
    loss = 0
    for i in range(5):
        output, hidden = model(chunk[:, i], hidden)
        loss += F.cross_entropy(output.view(4, -1), chunk[:, i + 1])
    model.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.data.add_(p.grad.data, alpha=-0.05)
    print(f"characters loss {loss.data.item() / 5:.6f}")
hidden, letter, written = model.init_hidden(1), torch.tensor([3]).to(device), []
for _ in range(4):
    output, hidden = model(letter, hidden)
    letter = torch.multinomial(output.data.view(-1).div(0.8).exp(), 1)
    written.append(int(letter[0]))
print("written", written)

# -- a sine, in double precision by LBFGS ------------------------------------------------------------------------------


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.linear = nn.LSTMCell(1, 8), nn.Linear(8, 1)

    def forward(self, input, future=0):
        outputs = []
        h = torch.zeros(input.size(0), 8, dtype=torch.double, device=input.device)
        c = torch.zeros(input.size(0), 8, dtype=torch.double).to(device)
        for input_t in input.split(1, dim=1):
            h, c = self.lstm(input_t, (h, c))
            outputs.append(self.linear(h))
        for _ in range(future):
            h, c = self.lstm(outputs[-1], (h, c))
            outputs.append(self.linear(h))
        return torch.cat(outputs, dim=1)


x = np.arange(10)[None] + np.random.randint(-20, 20, 8)[:, None]
data = torch.from_numpy(np.sin(x / 5.0)).to(device)
model = Sequence()
model.double().to(device)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)


def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(model(data[3:, :-1]), data[3:, 1:])
    print(f"sine loss {loss.item():.6f}")
    loss.backward()
    return loss


for _ in range(2):
    optimizer.step(closure)
    with torch.no_grad():
        predicted = model(data[:3, :-1], future=3)
        print(f"test loss {F.mse_loss(predicted[:, :-3], data[:3, 1:]).item():.6f}")
        print(f"future {predicted.detach().cpu().numpy()[0].sum():.5f}")
