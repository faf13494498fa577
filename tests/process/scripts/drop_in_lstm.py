"""A recurrent language model: the LSTM's state is passed from call to call, weights are updated without an optimizer.

With --ap it has the one line; prints losses, perplexities and sampled words.
"""

import math
import sys

import torch
from torch import nn

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

NUM_WORDS, NUM_COLUMNS, SPAN = 30, 4, 7
LEARNING_RATE, MAX_NORM = 5.0, 0.25
FILE = "recurrent-ap.pt" if "--ap" in sys.argv else "recurrent.pt"


class RecurrentModel(nn.Module):
    """Reads words of shape (time, columns); returns log-probabilities of the next, a row per word, and the state."""

    def __init__(self, embedding_size=16, hidden_size=24, num_layers=2, dropout=0.2):
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, embedding_size)
        self.lstm = nn.LSTM(embedding_size, hidden_size, num_layers, dropout=dropout)
        self.output = nn.Linear(hidden_size, NUM_WORDS)
        self.dropout = nn.Dropout(dropout)
        for layer in (self.embedding, self.output):
            nn.init.uniform_(layer.weight, a=-0.1, b=0.1)

    def forward(self, words, state):
        features, state = self.lstm(self.dropout(self.embedding(words)), state)
        scores = self.output(self.dropout(features))
        return nn.functional.log_softmax(scores.view(-1, NUM_WORDS), dim=1), state

    def initial_state(self, num_columns):
        like, lstm = next(self.parameters()), self.lstm
        return tuple(like.new_zeros((lstm.num_layers, num_columns, lstm.hidden_size)) for _ in ("output", "cell"))


def without_graph(state):
    """Returns the state detached from the calls that it was computed by."""
    if isinstance(state, torch.Tensor):
        return state.detach()
    return tuple(without_graph(part) for part in state)


def in_columns(text):
    """Cuts a text into columns of one length, side by side; words that are left over are dropped."""
    length = text.size(0) // NUM_COLUMNS
    return text.narrow(0, 0, length * NUM_COLUMNS).view(NUM_COLUMNS, length).t().contiguous().to(device)


def spans(columns):
    """Yields consecutive spans of a text, each with the words that follow its words."""
    last = columns.size(0) - 1
    for begin in range(0, last, SPAN):
        end = min(begin + SPAN, last)
        yield columns[begin:end], columns[begin + 1 : end + 1].view(-1)


def mean_loss(columns):
    """Returns the mean loss per word of a text that is read from its beginning."""
    model.eval()
    state, weighted_sum = model.initial_state(NUM_COLUMNS), 0.0
    with torch.no_grad():
        for words, following in spans(columns):
            log_probs, state = model(words, state)
            weighted_sum += criterion(log_probs, following).item() * len(words)
            state = without_graph(state)
    return weighted_sum / (len(columns) - 1)


def train_one_epoch(columns):
    """Reads a text once and updates the weights after each span; yields the losses."""
    model.train()
    state = model.initial_state(NUM_COLUMNS)
    for words, following in spans(columns):
        state = without_graph(state)
        model.zero_grad()
        log_probs, state = model(words, state)
        loss = criterion(log_probs, following)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for weight in model.parameters():
            weight.data.add_(weight.grad, alpha=-LEARNING_RATE)
        yield loss.item()


def sample(count, first=3):
    """Returns words sampled one after the other; each is written into the tensor that the model reads next."""
    sampled, state = [], model.initial_state(1)
    word = torch.full((1, 1), first, dtype=torch.long, device=device)
    with torch.no_grad():
        while len(sampled) < count:
            log_probs, state = model(word, state)
            chosen = torch.multinomial(log_probs.squeeze().div(1.0).exp().cpu(), 1)[0]
            word.fill_(chosen)
            sampled.append(int(chosen))
    return sampled


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(17)
text = torch.arange(400).mul(7).add(torch.randint(0, 3, (400,))).remainder(NUM_WORDS)
training_text, held_out_text = (in_columns(part) for part in text.split([300, 100]))
criterion = nn.NLLLoss()
model = RecurrentModel().to(device)
for epoch in ("first", "second"):
    for number, loss in enumerate(train_one_epoch(training_text)):
        if number % 3 == 0:
            print(f"{epoch} epoch, span {number}: loss {loss:.6f} perplexity {math.exp(loss):.2f}")
    print(f"held-out loss {mean_loss(held_out_text):.6f}")

with open(FILE, "wb") as file:
    torch.save(model, file)
with open(FILE, "rb") as file:
    model = torch.load(file, weights_only=False).to(device)
model.lstm.flatten_parameters()
print(f"loaded loss {mean_loss(held_out_text):.6f}")
print("words", sample(6))
