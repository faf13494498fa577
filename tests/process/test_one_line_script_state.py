"""Recurrent states that a script sets on its model before each call, with rows along the second dim: split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both, train_step
from torch import nn

pytestmark = pytest.mark.rotating  # one more model or plan each


@pytest.fixture(params=["replicate=2", "shard=2", "replicate=3"], autouse=True)
def session(request, accelerator):
    return accelerator(request.param, strict=True)  # a call that every device computes whole is an error


class Tagger(nn.Module):
    """An LSTM that goes on from the state that its script sets."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(12, 5)
        self.recurrent = nn.LSTM(8, 12, batch_first=batch_first)
        self.dropout = nn.Dropout(0.2)

    def forward(self, words):
        hidden, self.last = self.recurrent(self.dropout(self.embed(words)), self.state)
        return self.head(hidden)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("is_carried", [False, True])
def test_a_state_that_the_script_sets_before_each_call_is_cut_as_its_inputs_are(batch_first, is_carried):
    def script(device):
        torch.manual_seed(0)
        model = Tagger(batch_first=batch_first).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trace, state = [], None
        for _ in range(4):
            rows = 7
            words, tags = torch.randint(0, 30, (rows, 4)), torch.randint(0, 5, (rows, 4))
            if not batch_first:
                words, tags = words.T.contiguous(), tags.T.contiguous()
            if state is None or not is_carried:
                state = (torch.randn(1, rows, 12).to(device), torch.zeros(1, rows, 12, device=device))
            model.state = state
            loss = F.cross_entropy(model(words.to(device)).flatten(0, 1), tags.to(device).flatten())
            state = tuple(part.detach() for part in model.last)
            train_step(trace, model, optimizer, loss)
        return [*trace, *model.state_dict().values(), torch.rand(2)]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-6)
