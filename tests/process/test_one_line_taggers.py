"""Taggers and other recurrent models of public scripts: sequences packed and padded, a number of rows that is kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

pytestmark = pytest.mark.rotating  # one more model or plan each

WHOLE = "Every device computes the whole batch"
TAGS = 4


@pytest.fixture(params=["replicate=2", "shard=2", "replicate=3"], autouse=True)
def session(request, accelerator):
    return accelerator(request.param)


class Recurrent(nn.Module):
    """Pads to the longest sequence of the batch; the longest of another worker's rows is shorter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.dropout = nn.Dropout(dropout)
        self.recurrent = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, TAGS)

    def forward(self, words_BT: Tensor, lengths_B: Tensor) -> Tensor:
        embedded_BTE = self.dropout(self.embedding(words_BT))
        packed = pack_padded_sequence(embedded_BTE, lengths_B.cpu(), batch_first=True, enforce_sorted=False)
        hidden_BTH, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return self.head(hidden_BTH)


class Tagger(Recurrent):
    """A conditional random field over tags and a mask as wide as the batch."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.transitions = nn.Parameter(torch.randn(TAGS, TAGS) / 10)

    def forward(self, words_BT: Tensor, lengths_B: Tensor) -> Tensor:
        scores_BTN, mask_BT, tags_BT = super().forward(words_BT, lengths_B), words_BT > 0, words_BT % TAGS
        if scores_BTN.shape[:2] != mask_BT.shape:
            raise ValueError("emissions and mask have to be of one length")
        rows = torch.arange(len(words_BT))
        path_B, all_BN = scores_BTN[rows, 0, tags_BT[:, 0]], scores_BTN[:, 0]
        for step in range(1, scores_BTN.shape[1]):
            here_B, before_B, now_B = mask_BT[:, step], tags_BT[:, step - 1], tags_BT[:, step]
            path_B = path_B + here_B * (self.transitions[before_B, now_B] + scores_BTN[rows, step, now_B])
            next_BN = torch.logsumexp(all_BN[:, :, None] + self.transitions + scores_BTN[:, step, None], 1)
            all_BN = torch.where(here_B[:, None], next_BN, all_BN)
        return (torch.logsumexp(all_BN, 1) - path_B).mean()


class Meeting(Recurrent):
    """Rows meet in the loss: of all others, none is to be alike."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Recurrent()

    def forward(self, words_BT: Tensor, lengths_B: Tensor) -> Tensor:
        features_BD = F.normalize(self.encoder(words_BT, lengths_B).flatten(1).cumsum(1)[:, -TAGS:], dim=1)
        return F.cross_entropy(features_BD @ features_BD.T, torch.arange(len(words_BT), device=words_BT.device))


class Masked(nn.Module):
    """Cuts words, and makes a mask, by the longest sentence of the batch, of which lengths tell."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout, self.head = nn.Embedding(20, 8), nn.Dropout(0.2), nn.Linear(8, TAGS)

    def forward(self, words_BT: Tensor, lengths_B: Tensor) -> Tensor:
        longest, shortest = torch.max(lengths_B).item(), lengths_B.min()
        mask_BT = torch.arange(longest) < lengths_B.unsqueeze(1)
        hidden_BTE = self.dropout(self.embedding(words_BT[:, :longest])) * mask_BT.to(words_BT.device).unsqueeze(2)
        return self.head(hidden_BTE) * (shortest / longest)


def sentences(rows: int, longest: int) -> tuple[Tensor, Tensor]:
    """Returns words and lengths: the longest sentence is the first or the last."""
    lengths_B = torch.randint(2, longest, (rows,))
    lengths_B[(longest % 2) * (rows - 1)] = longest
    words_BT = torch.randint(1, 20, (rows, longest))
    return words_BT * (torch.arange(longest) < lengths_B[:, None]), lengths_B


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("model_class", [Recurrent, Tagger, Meeting, Masked])
def test_packed_sequences_are_padded_to_the_longest_of_the_batch(model_class, capsys):
    def script(device):
        torch.manual_seed(0)
        model = model_class().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trace = []
        for rows, longest in ((8, 9), (8, 6), (7, 7), (6, 8)):
            words_BT, lengths_B = sentences(rows, longest)
            loss = model(words_BT.to(device), lengths_B)
            if loss.ndim:
                trace.append(loss.detach())
                tags_BT = torch.where(words_BT > 0, words_BT % TAGS, -100).to(device)
                loss = F.cross_entropy(loss.transpose(1, 2), tags_BT, ignore_index=-100)
            take_step(optimizer, loss)
            trace.append(loss.detach())
        trace += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [*trace, *model.state_dict().values(), torch.rand(2)]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


ROWS = 8


class Settings:
    """Of the script."""

    rows = 0


class KeepsRows(nn.Module):
    """Begins with states for as many rows as it was told; its width is the same number."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.batch_size, self.settings = where, ROWS, Settings()
        self.settings.rows = self.width = ROWS
        self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(ROWS, TAGS)
        self.recurrent = nn.LSTM(6, ROWS, batch_first=where != "time first")

    def forward(self, words_BT: Tensor) -> Tensor:
        rows = {"global": ROWS, "settings": self.settings.rows}.get(self.where, self.batch_size)
        states = [torch.zeros(1, rows, self.width, device=words_BT.device) for _ in range(2)]
        hidden_BTH, _ = self.recurrent(self.embedding(words_BT), tuple(states))
        return self.head(hidden_BTH)


@pytest.mark.parametrize("where", ["attribute", "time first", "global", "settings"])
def test_a_number_of_rows_that_the_script_keeps(where, capsys):
    def script(device):
        torch.manual_seed(0)
        model = KeepsRows(where).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trace = []
        for rows in (8, 8, 8, 6) if where == "attribute" else (8, 8, 8):
            words = torch.randint(20, (5, rows) if where == "time first" else (rows, 5))
            model.batch_size = rows
            scores = model(words.to(device))
            loss = F.cross_entropy(scores.flatten(0, 1), words.flatten().to(device) % TAGS)
            take_step(optimizer, loss)
            trace += [scores.detach(), loss.detach()]
        assert model.batch_size == rows
        trace += [parameter.grad for parameter in model.parameters()]
        return [*trace, *model.state_dict().values()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


class CutsOff(nn.Module):
    """Goes on from the state of the last forward, which it cuts off from what computed it."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head, self.state = nn.GRU(6, 5, batch_first=True), nn.Linear(5, TAGS), None

    def forward(self, x_BTF: Tensor) -> Tensor:
        state = None if self.state is None else self.state.detach()
        hidden_BTH, self.state = self.recurrent(x_BTF, state)
        return self.head(hidden_BTH)


def test_a_state_that_the_next_forward_cuts_off(capsys):
    def script(device):
        torch.manual_seed(0)
        model = CutsOff().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trace = []
        for _ in range(4):
            loss = model(torch.randn(6, 5, 6).to(device)).square().mean()
            take_step(optimizer, loss)
            trace += [loss.detach(), model.state.detach()]
        return [*trace, *model.state_dict().values()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out  # the state has its rows in dim 1


def test_tags_as_lists_of_which_each_is_as_long_as_its_sequence():
    """As the decoder of pytorch-crf gives them: another number of tags in each batch of equal shapes."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, TAGS)

        def forward(self, x_BTE: Tensor, mask_BT: Tensor) -> list[list[int]]:
            best_BT = self.head(x_BTE).argmax(-1)
            return [[int(tag) for tag, is_word in zip(tags, mask) if is_word] for tags, mask in zip(best_BT, mask_BT)]

    def script(device):
        torch.manual_seed(0)
        model, found = Decoder().to(device).eval(), []
        for lengths in ([6, 5, 3, 3, 6, 3, 4], [6, 6, 6, 5, 3, 6, 6], [6, 3, 3, 3, 3, 3, 3]):
            mask_BT = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
            with torch.no_grad():
                found.append(model(torch.randn(7, 6, 4).to(device), mask_BT.to(device)))
        return found

    here, there = on_both(script)
    assert here == there and [len(tags) for tags in there[1]] == [6, 6, 6, 5, 3, 6, 6]
