"""Terms that are zero in the first call, and not in later ones: added once, not once a worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn

from moreh_ap.session.session import Session

pytestmark = pytest.mark.rotating  # one more term each


class Penalised(nn.Module):
    """A mean loss, and something that no row has a part in."""

    def __init__(self, term: str) -> None:
        super().__init__()
        self.linear, self.term = nn.Linear(6, 3), term
        self.low_rank = nn.Parameter(torch.zeros(3, 3))
        self.log_variance = nn.Parameter(torch.zeros(()))
        self.gate = nn.Parameter(torch.zeros(3))
        self.register_buffer("penalty", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.linear(x) @ (torch.eye(3, device=x.device) + self.low_rank)
        if self.term == "gate":
            out = out + self.gate * (out - out.mean(0))
        loss = F.mse_loss(out, y)
        if self.term == "buffer":
            return loss + self.penalty
        if self.term == "square":
            return loss + 0.5 * self.low_rank.pow(2).sum()
        return torch.exp(-self.log_variance) * loss + self.log_variance


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
@pytest.mark.parametrize("term", ["buffer", "square", "variance", "gate"])
def test_a_term_that_is_zero_in_the_first_call(accelerator: Callable[[str], Session], term, plan):
    def script(device: str) -> object:
        model, trace = Penalised(term).to(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        x, y = torch.randn(6, 6).to(device), torch.randn(6, 3).to(device)
        with torch.no_grad():
            trace.append(model(x, y))  # as a trainer that evaluates before it trains
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            model.penalty.add_(0.5)
            trace.append(loss)
        with torch.no_grad():
            trace.append(model(x, y))
        return trace, model.state_dict()

    accelerator(plan)
    assert_same(*on_both(script))


class Contrasting(nn.Module):
    """As MoCo: a queue of keys with a place that moves, and an encoder that follows another in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q, self.encoder_k = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 18), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, im_q: Tensor, im_k: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
                param_k.mul_(0.9).add_(param_q, alpha=0.1)
            k = F.normalize(self.encoder_k(im_k), dim=1)
        own, others = torch.einsum("nc,nc->n", q, k).unsqueeze(-1), q @ self.queue.clone().detach()
        logits = torch.cat([own, others], dim=1) / 0.07
        place = int(self.queue_ptr)
        self.queue[:, place : place + len(k)] = k.T
        self.queue_ptr[0] = (place + len(k)) % self.queue.shape[1]
        return logits, torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)


def test_a_place_in_a_queue_that_is_zero_in_the_first_call(accelerator: Callable[[str], Session]):
    """Later calls take another way than the trial; what they have changed by then is undone."""

    def script(device: str) -> object:
        model, trace = Contrasting().to(device), []
        optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.3)
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.cross_entropy(*model(torch.randn(6, 6).to(device), torch.randn(6, 6).to(device)))
            loss.backward()
            optimizer.step()
            trace.append(loss)
        return trace, model.state_dict()

    accelerator("replicate=2", strict=True)
    assert_same(*on_both(script))


class Equilibrium(nn.Module):
    """Solves for its gradient in a hook, until the step of all rows together is small."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.given = nn.Linear(8, 8), nn.Linear(8, 8)

    def _step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.9 * self.own(z) + self.given(x))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(30):
                z = self._step(z, x)
        z = self._step(z, x)
        start = z.clone().detach().requires_grad_()
        after = self._step(start, x)

        def solve(gradient: Tensor) -> Tensor:
            found = gradient
            for _ in range(40):
                (change,) = torch.autograd.grad(after, start, found, retain_graph=True)
                before, found = found, change + gradient
                if (found - before).norm().item() < 0.05 * found.norm().item():
                    break
            return found

        z.register_hook(solve)
        return z


def test_a_solver_in_the_backward_whose_rows_stop_together_in_the_first_call(accelerator: Callable[[str], Session]):
    def script(device: str) -> object:
        model = nn.Sequential(nn.Linear(4, 8), Equilibrium(), nn.Linear(8, 3)).to(device)
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=0.5), []
        for step in range(8):
            x, y = torch.randn(8, 4) * torch.linspace(0.1, 3, 8)[:, None], torch.randint(0, 3, (8,))
            if step == 0:
                x, y = x[:1].expand(8, -1).clone(), y[:1].expand(8).clone()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            trace.append(loss)
        return trace, model.state_dict()

    accelerator("replicate=2")
    assert_same(*on_both(script))
