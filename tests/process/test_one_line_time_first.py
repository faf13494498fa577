"""Translation and speech models with steps first: packed, attended to, fed back or forced, and all split."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

pytestmark = pytest.mark.rotating  # one more model or plan each

WORDS, START, ROWS = 20, 1, 8


@pytest.fixture(params=["replicate=2", "shard=2", "replicate=3"], autouse=True)
def session(request, accelerator):
    return accelerator(request.param, strict=True)  # a call that every device computes whole is an error


class Encoder(nn.Module):
    """Two layers of packed sequences, with dropout between them; its states have their rows in dim 1."""

    def __init__(self, embedding: nn.Embedding, *, is_sorted: bool) -> None:
        super().__init__()
        self.embedding, self.is_sorted = embedding, is_sorted
        self.recurrent = nn.GRU(8, 8, 2, dropout=0.3, bidirectional=True)

    def forward(self, words_TB: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(self.embedding(words_TB), lengths_B.cpu(), enforce_sorted=self.is_sorted)
        outputs_TBH, state_LBH = self.recurrent(packed)
        outputs_TBH, _ = pad_packed_sequence(outputs_TBH)
        return outputs_TBH[:, :, :8] + outputs_TBH[:, :, 8:], state_LBH


class Decoder(nn.Module):
    """One step of all rows: words are (1, B), which has one row along dim 0."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.dropout = embedding, nn.Dropout(0.2)
        self.recurrent, self.head = nn.GRU(8, 8, 2, dropout=0.3), nn.Linear(16, WORDS)

    def forward(self, words_1B: Tensor, state_LBH: Tensor, seen_TBH: Tensor) -> tuple[Tensor, Tensor]:
        hidden_1BH, state_LBH = self.recurrent(self.dropout(self.embedding(words_1B)), state_LBH)
        weights_BT = (hidden_1BH * seen_TBH).sum(2).t().softmax(1)
        context_BH = torch.bmm(weights_BT.unsqueeze(1), seen_TBH.transpose(0, 1)).squeeze(1)
        return self.head(torch.cat([hidden_1BH.squeeze(0), context_BH], 1)).log_softmax(1), state_LBH


class Translator(nn.Module):
    """Encoder and decoder in one model, which draws in each step whether a word is forced."""

    def __init__(self, *, is_sorted: bool) -> None:
        super().__init__()
        embedding = nn.Embedding(WORDS, 8)
        self.encoder, self.decoder = Encoder(embedding, is_sorted=is_sorted), Decoder(embedding)

    def forward(self, words_TB: Tensor, lengths_B: Tensor, wanted_TB: Tensor) -> Tensor:
        seen_TBH, state_LBH = self.encoder(words_TB, lengths_B)
        scores_TBN = torch.zeros(*wanted_TB.shape, WORDS, device=words_TB.device)
        next_B, state_LBH = wanted_TB[0], state_LBH[:2]
        for step in range(1, len(wanted_TB)):
            scores_TBN[step], state_LBH = self.decoder(next_B.unsqueeze(0), state_LBH, seen_TBH)
            next_B = wanted_TB[step] if random.random() < 0.5 else scores_TBN[step].argmax(1)
        return scores_TBN


def sentences(is_sorted: bool, longest: int, wanted: int) -> tuple[Tensor, Tensor, Tensor]:
    lengths_B = torch.randint(2, longest + 1, (ROWS,))
    lengths_B[3] = longest
    lengths_B = lengths_B.sort(descending=True)[0] if is_sorted else lengths_B
    words_TB = torch.randint(2, WORDS, (longest, ROWS)) * (torch.arange(longest)[:, None] < lengths_B)
    wanted_TB = torch.randint(2, WORDS, (wanted, ROWS))
    wanted_TB[3:, ::2] = 0
    return words_TB, lengths_B, wanted_TB


def masked_loss(scores_BN: Tensor, wanted_B: Tensor, mask_B: Tensor) -> Tensor:
    return -torch.gather(scores_BN, 1, wanted_B.view(-1, 1)).squeeze(1).masked_select(mask_B).mean()


SIZES = ((7, 5), (9, 4), (8, 6), (6, 8))  # steps of words and of translations; there are as many rows as steps in two


@pytest.mark.parametrize("is_sorted", [True, False])
def test_encoder_and_decoder_are_called_step_by_step(is_sorted):
    def script(device):
        torch.manual_seed(0)
        embedding = nn.Embedding(WORDS, 8)
        encoder, decoder = Encoder(embedding, is_sorted=is_sorted).to(device), Decoder(embedding).to(device)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (encoder, decoder)]
        trace = []
        for number, (longest, wanted) in enumerate(SIZES):
            words_TB, lengths_B, wanted_TB = sentences(is_sorted, longest, wanted)
            wanted_TB = wanted_TB.to(device)
            seen_TBH, state_LBH = encoder(words_TB.to(device), lengths_B)
            words_1B, state_LBH, loss = torch.LongTensor([[START] * ROWS]).to(device), state_LBH[:2], 0
            for step in range(wanted):
                scores_BN, state_LBH = decoder(words_1B, state_LBH, seen_TBH)
                loss = loss + masked_loss(scores_BN, wanted_TB[step], wanted_TB[step] != 0)
                best = scores_BN.topk(1)[1]
                fed_back = torch.LongTensor([[best[row][0] for row in range(ROWS)]]).to(device)
                words_1B = wanted_TB[step].view(1, -1) if number % 2 else fed_back
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            trace.append(loss.detach())
        return [*trace, *encoder.state_dict().values(), *decoder.state_dict().values(), torch.rand(2)]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_model_draws_which_words_are_forced(is_sorted):
    def script(device):
        random.seed(0)
        torch.manual_seed(0)
        model = Translator(is_sorted=is_sorted).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trace = []
        for longest, wanted in SIZES:
            words_TB, lengths_B, wanted_TB = sentences(is_sorted, longest, wanted)
            scores_TBN = model(words_TB.to(device), lengths_B.to(device), wanted_TB.to(device))
            loss = F.nll_loss(scores_TBN[1:].view(-1, WORDS), wanted_TB[1:].view(-1).to(device), ignore_index=0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace += [loss.detach(), scores_TBN.detach()]
        return [*trace, *model.state_dict().values(), torch.rand(2)]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class Speech(nn.Module):
    """Normalises over the batch, packs what is left of each recording, and returns scores with steps first."""

    def __init__(self) -> None:
        super().__init__()
        self.halve = nn.Sequential(nn.Conv1d(5, 8, 3, stride=2, padding=1), nn.BatchNorm1d(8), nn.ReLU())
        self.recurrent, self.head = nn.LSTM(8, 6, 2, dropout=0.2, bidirectional=True), nn.Linear(12, 7)

    def forward(self, x_BTF: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        hidden_TBH, lengths_B = self.halve(x_BTF.transpose(1, 2)).permute(2, 0, 1), (lengths_B + 1) // 2
        packed = pack_padded_sequence(hidden_TBH, lengths_B.cpu(), enforce_sorted=False)
        hidden_TBH, _ = pad_packed_sequence(self.recurrent(packed)[0])
        return self.head(hidden_TBH).log_softmax(-1), lengths_B


def test_recordings_that_are_normalised_over_the_batch():
    def script(device):
        torch.manual_seed(0)
        model = Speech().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trace = []
        for longest in (20, 16, 24):
            lengths_B = torch.randint(12, longest + 1, (ROWS,))
            lengths_B[5] = longest
            x_BTF, letters_BL = torch.randn(ROWS, longest, 5), torch.randint(1, 7, (ROWS, 4))
            scores_TBN, lengths_B = model(x_BTF.to(device), lengths_B.to(device))
            loss = F.ctc_loss(scores_TBN, letters_BL.to(device), lengths_B, torch.full((ROWS,), 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace += [loss.detach(), scores_TBN.detach()]
        return [*trace, *model.state_dict().values(), torch.rand(2)]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
