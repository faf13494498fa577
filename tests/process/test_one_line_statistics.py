"""Normalisation over the batch, and random numbers inside forward: those of one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from rotating import rotating_from
from test_one_line_training import assert_same, on_both
from torch import nn
from torch.ao.quantization import QuantStub, get_default_qat_qconfig, prepare_qat

from moreh_ap.errors import PlanError

WHOLE = "Every device computes the whole batch"


@pytest.fixture(params=rotating_from(1, ["replicate=2", "shard=2"]), autouse=True)
def session(request, accelerator):
    return accelerator(request.param)


NORMS = {
    "batch 2d": lambda: nn.BatchNorm2d(4),
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "without running statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "synchronised": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(4)),
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("name", rotating_from(1, NORMS))
def test_statistics_are_those_of_the_whole_batch_and_each_worker_computes_its_rows(name, capsys):
    def script(device):
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(4) if name == "synchronised" and device == "cpu" else NORMS[name]()
        model = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trace = []
        for rows in (6, 5, 3):
            x, y = torch.randn(rows, 1, 6, 6).to(device), torch.randint(0, 3, (rows,)).to(device)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss.detach())
        trace += [buffer.float() for buffer in model.buffers()]
        model.eval()
        with torch.no_grad():
            trace.append(model(torch.ones(4, 1, 6, 6, device=device)))
        return trace

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


def accumulated(model, device, row_counts):
    """Returns the losses of batches of four features, the gradients that they add up to, and the buffers after them."""
    losses = []
    for rows in row_counts:
        loss = model(torch.randn(rows, 4).to(device)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses, [parameter.grad for parameter in model.parameters()], list(model.buffers())


def test_batch_norm_of_features_and_a_part_that_is_frozen(capsys):
    def script(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(
            device
        )
        model[3].eval()
        return accumulated(model, device, (8, 2, 7))

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


def test_a_worker_may_have_one_value_a_channel_and_rows_may_be_dropped_out(capsys):
    """Of three rows on two workers one is alone; the last layer sees one value a channel of each row."""

    def script(device):
        torch.manual_seed(0)
        # No bias in front of the normalisation: its gradient is zero but for rounding, of which Adam makes a step.
        first = nn.Linear(4, 16, bias=False)
        model = nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for rows in (5, 3, 2):
            x, y = torch.randn(rows, 4).to(device), torch.randint(0, 2, (rows,)).to(device)
            for _ in range(2):  # two batches of gradients a step
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return losses, list(model.buffers())

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


def test_one_value_a_channel_in_the_whole_batch_is_the_error_of_one_device():
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).cuda()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model(torch.randn(1, 4).cuda())


class CustomLoss(nn.Module):
    """Classifies with batch normalisation and takes the mean loss itself, with statistics in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6, track_running_stats=False), nn.Flatten())
        self.head = nn.LazyLinear(3)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.body(x).tanh()), y)


def test_means_inside_of_the_model_and_statistics_in_evaluation(capsys):
    def script(device):
        torch.manual_seed(0)
        model = CustomLoss().to(device)
        x, y = torch.randn(7, 2, 8).to(device), torch.randint(0, 3, (7,)).to(device)
        loss = model(x, y)
        loss.backward()
        with torch.no_grad():
            without = model.eval()(x[:5], y[:5])
        return loss.detach(), without, [parameter.grad for parameter in model.parameters()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


class Heads(nn.Module):
    """The mean of what a head makes of several dropouts; the number of heads is that of the rows that are tried."""

    def __init__(self, *norm):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), *norm, nn.ReLU())
        self.drops = nn.ModuleList(nn.Dropout(p) for p in (0.1, 0.3))
        self.head = nn.Linear(8, 3)

    def forward(self, x, target=None):
        hidden = self.body(x)
        scores = torch.stack([self.head(drop(hidden)) for drop in self.drops]).mean(0)
        return scores if target is None else F.cross_entropy(scores, target)


@pytest.mark.parametrize("norms", rotating_from(1, [0, 1]))
@pytest.mark.parametrize("gives_loss", rotating_from(1, [False, True]))
def test_a_mean_over_heads_is_no_mean_over_the_batch(capsys, norms, gives_loss):
    def script(device):
        torch.manual_seed(0)
        model = Heads(*(nn.BatchNorm1d(8) for _ in range(norms))).to(device)
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=0.1), []
        for rows in (6, 7, 4):
            x, y = torch.randn(rows, 4).to(device), torch.randint(0, 3, (rows,)).to(device)
            loss = model(x, y) if gives_loss else F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss.detach())
        return [*trace, *model.state_dict().values()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


def test_micro_batches_are_refused(accelerator):
    accelerator("replicate=2,micro_batches=2")
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).cuda()
    with pytest.raises(PlanError, match="batch normalisation takes the statistics of all its rows"):
        model(torch.randn(8, 4).cuda())


class Noisy(nn.Module):
    """Draws random numbers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.linear(x) + scale * torch.randn_like(x)


def test_random_numbers_in_forward_are_own_ones_for_each_row_and_follow_the_seed():
    torch.manual_seed(0)
    model, x = Noisy().cuda(), torch.ones(8, 4, device="cuda")
    torch.manual_seed(1)
    first, second = model(x, 1.0).detach().cpu(), model(x, 1.0).detach().cpu()
    torch.manual_seed(1)
    assert torch.equal(first, model(x, 1.0).detach().cpu()) and not torch.equal(first, second)
    assert len({tuple(row) for row in first.tolist()}) == 8, "two workers drew the same"


class NeedsItsFirstRow(nn.Module):
    """Raises an error without the first row of the batch, as detectors do whose labels count its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        if x[0, 0] != 9.0:
            raise IndexError("the first row is not there")
        return self.norm(self.inlet(x))


@pytest.mark.filterwarnings("error::moreh_ap.errors.TrialWarning")
def test_rows_that_raise_an_error_on_one_worker_alone_leave_no_other_waiting(capsys):
    """The error is the script's own, also where the trial changes its inputs in the last digits."""

    def script(device):
        torch.manual_seed(0)
        model, x = NeedsItsFirstRow().to(device), torch.randn(8, 4)
        x[0, 0] = 9.0
        losses = []
        for _ in range(2):
            losses.append(model(x.to(device)).square().mean())
            losses[-1].backward()
        return torch.stack(losses).detach(), [parameter.grad for parameter in model.parameters()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE in capsys.readouterr().out


class NeedsExactInputs(nn.Module):
    """Raises an error unless the last input of each row is exactly one."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        if not bool((x[:, -1] == 1.0).all()):
            raise ValueError("the last input is not one")
        return self.norm(self.inlet(x)).square()


@pytest.mark.filterwarnings("error::moreh_ap.errors.TrialWarning")
def test_a_forward_that_compares_its_inputs_with_numbers_is_split(capsys):
    def script(device):
        torch.manual_seed(0)
        model, x = NeedsExactInputs().to(device), torch.randn(8, 4)
        x[:, -1] = 1.0
        loss = model(x.to(device)).mean(0)[1]
        loss.backward()
        return loss.detach(), [model.inlet.weight.grad, *model.state_dict().values()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


class PaddedTargets(nn.Module):
    """As RetinaNets: targets of a row end with -1, and one line takes a mean over rows, and that of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x_BF, targets_BT):
        losses, hidden_BCF = [], self.norm(self.body(x_BF[:, None]))
        for scores_C, targets_T in zip(self.head(hidden_BCF.relu().amax(2)), targets_BT):
            valid_T = targets_T[targets_T != -1]
            losses.append((scores_C[:, None] - valid_T).square().sum())
        return torch.stack(losses).mean(dim=0, keepdim=True).mean()


@pytest.mark.rotating
def test_targets_up_to_a_mark_and_the_mean_of_a_mean_in_one_line(capsys):
    """A mark that is changed a little is none: the loss seemed to be rounding, and that of one worker right."""

    def script(device):
        torch.manual_seed(0)
        model, losses = PaddedTargets().to(device), []
        for rows in (8, 8, 7):
            targets = 3 + torch.rand(rows, 4)
            targets[:, 2:] = -1
            loss = model(torch.randn(rows, 6).to(device), targets.to(device))
            loss.backward()
            losses.append(loss.detach())
        return losses, [parameter.grad for parameter in model.parameters()][2:], list(model.buffers())

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


class ReversesGradients(nn.Module):
    """Reverses the gradient of features by a hook, as domain adversarial networks may: it needs gradients to run."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x_BF):
        hidden_BC = self.norm(self.body(x_BF))
        hidden_BC.register_hook(lambda gradient_BC: -0.5 * gradient_BC)
        return self.head(hidden_BC)


@pytest.mark.rotating
def test_a_forward_that_puts_a_hook_on_what_needs_a_gradient_is_split(capsys):
    def script(device):
        torch.manual_seed(0)
        return accumulated(ReversesGradients().to(device), device, (8, 5))

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


def test_a_running_mean_that_is_zero_but_for_rounding(capsys):
    def script(device):
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=0.01), nn.Conv2d(8, 16, 1, bias=False)]
        model = nn.Sequential(*layers, nn.BatchNorm2d(16, momentum=0.01), nn.ReLU(), nn.Conv2d(16, 2, 4)).to(device)
        loss = model(torch.randn(8, 3, 6, 6).to(device)).square().mean()
        loss.backward()
        return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.ndim > 1]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


@pytest.mark.parametrize("evaluates", rotating_from(1, ["at the end", "each step"]))
def test_an_average_that_shares_the_buffers_of_a_model(evaluates):
    """`average.data = buffer.data`, as the moving averages of ignite and others write it."""

    def script(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).to(device)
        average = copy.deepcopy(model).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trace = []
        for rows in (6, 6, 5):
            x, y = torch.randn(rows, 4).to(device), torch.randint(0, 2, (rows,)).to(device)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.mul_(0.9).add_(parameter.data, alpha=0.1)
                for kept, buffer in zip(average.buffers(), model.buffers(), strict=True):
                    kept.data = buffer.data
                if evaluates == "each step":
                    trace.append(average(x))
            trace += [loss.detach(), *(buffer.clone().float() for buffer in model.buffers())]
        with torch.no_grad():
            trace += [average(torch.ones(4, 4, device=device)), model.eval()(torch.ones(4, 4, device=device))]
        return trace, list(model.state_dict().values()), list(average.state_dict().values())

    with pytest.warns(UserWarning, match="are copies from now on"):
        assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


def test_observers_that_learn_in_their_first_forward_how_many_channels_there_are(capsys):
    """Quantization-aware training: the trial ended in a RuntimeError, since it had resized their buffers."""

    def script(device):
        torch.manual_seed(0)
        model = nn.Sequential(QuantStub(), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).train()
        model.qconfig = get_default_qat_qconfig("fbgemm")
        model = prepare_qat(model).to(device)
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            loss = F.cross_entropy(model(torch.randn(6, 1, 6, 6).to(device)), torch.arange(6).to(device) % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss.detach())
        return trace, model.state_dict()

    assert_same(*on_both(script))
    assert WHOLE not in capsys.readouterr().out
