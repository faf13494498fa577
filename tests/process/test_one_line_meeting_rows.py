"""Models that compare the rows of a batch: each worker computes its own rows and gathers them where they meet."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn

pytestmark = pytest.mark.rotating  # one more model or plan each

WHOLE = "Every device computes the whole batch"


@pytest.fixture(params=["replicate=2", "shard=2", "replicate=3"], autouse=True)
def session(request, accelerator):
    return accelerator(request.param)


class TwoEncoders(nn.Module):
    """Encodes pairs; what is compared is for the subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
        self.right = nn.Linear(8, 6)
        self.temperature = nn.Parameter(torch.tensor(1.5))


class InBatchNegatives(TwoEncoders):
    """The other rows are the wrong answers, as in CLIP and in retrieval."""

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        left_BD = F.normalize(self.left(x_BF), dim=-1)
        scores_BB = self.temperature.exp() * left_BD @ F.normalize(self.right(y_BF), dim=-1).T
        answers_B = torch.arange(x_BF.size(0), device=x_BF.device)
        return (F.cross_entropy(scores_BB, answers_B) + F.cross_entropy(scores_BB.T, answers_B)) / 2, left_BD


class Shrinking:
    """In place of a forward, as the Matryoshka losses of sentence-transformers have it: keeps what it shrinks."""

    def __init__(self, encode) -> None:
        self.encode, self.kept = encode, []

    def __call__(self, x):
        embeddings = self.encode(x)
        self.kept.append(embeddings)
        return F.normalize(embeddings[:, :4], dim=-1)


class KeptInside(TwoEncoders):
    """Goes on with tensors that a module has not returned."""

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        encode = self.left.forward
        shrinking = self.left.forward = Shrinking(encode)
        try:
            left_BD, right_BD = self.left(x_BF), self.left(y_BF)
        finally:
            self.left.forward = encode
        scores_BB = self.temperature.exp() * left_BD @ right_BD.T
        columns_CD = torch.cat(shrinking.kept)
        divergence = F.kl_div(
            F.log_softmax(columns_CD, -1), columns_CD.detach().softmax(-1) ** 2, reduction="batchmean"
        )
        return F.cross_entropy(scores_BB, torch.arange(len(x_BF), device=x_BF.device)) + divergence, left_BD


class ColumnsTogether(TwoEncoders):
    """Two columns go through the encoder one behind the other: what is drawn for a row of both lies apart."""

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        first_BTD = F.dropout(self.left(torch.stack([x_BF, 2 * x_BF], dim=1)), 0.2)
        both_CTD = F.dropout(self.left(torch.stack([y_BF, -y_BF], dim=1).repeat(2, 1, 1)), 0.2)
        left_BD, columns_2BD = first_BTD.mean(1), both_CTD.mean(1).reshape(2, -1, first_BTD.shape[-1])
        scores_BC = left_BD @ torch.cat([*columns_2BD.unbind(0)]).T
        return F.cross_entropy(scores_BC, torch.arange(x_BF.size(0), device=x_BF.device)), left_BD


class SupervisedContrast(TwoEncoders):
    """Rows of one class attract each other; the diagonal is masked by as many rows as the batch has."""

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        features_BD = F.normalize(self.left(x_BF), dim=-1)
        classes_B1 = (y_BF[:, 0] > 0).long().view(-1, 1)
        others_BB = 1 - torch.eye(features_BD.shape[0], device=x_BF.device)
        alike_BB = (classes_B1 == classes_B1.T).float() * others_BB
        logits_BB = features_BD @ features_BD.T * self.temperature
        logits_BB = logits_BB - logits_BB.max(dim=1, keepdim=True)[0].detach()
        log_BB = logits_BB - (logits_BB.exp() * others_BB).sum(1, keepdim=True).log()
        return -((alike_BB * log_BB).sum(1) / alike_BB.sum(1).clamp(min=1)).mean(), features_BD


class OwnNormalisation(TwoEncoders):
    """Takes mean and variance of the batch itself, and divides by its number of rows."""

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        hidden_BH = self.left[0](x_BF)
        hidden_BH = (hidden_BH - hidden_BH.mean(0)) / (hidden_BH.var(0, unbiased=False) + 1e-5).sqrt()
        result_BD = self.left[2](hidden_BH)
        distance = torch.cdist(result_BD, result_BD).sum() / x_BF.shape[0]
        return F.mse_loss(result_BD, self.right(y_BF)) + 0.01 * distance, result_BD


class BalancedExperts(TwoEncoders):
    """The loads of two layers of experts, concatenated along the rows, are products of means over the batch."""

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        first_BE, second_BE = self.left(x_BF).softmax(-1), self.right(x_BF).softmax(-1)
        gates_NE = torch.cat([first_BE, second_BE])
        chosen_NE = F.one_hot(gates_NE.argmax(-1), 6).float()
        loss = (first_BE - second_BE).square().sum() / x_BF.shape[0]
        loss += 0.1 * 6 * (chosen_NE.mean(0) * gates_NE.mean(0)).sum()
        return loss, first_BE


class HardestRows(TwoEncoders):
    """A recurrent layer with time first, and a loss of the hardest rows of the batch; dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 6)

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        steps_TBH, _ = self.recurrent(torch.stack([x_BF, y_BF, x_BF * y_BF]))
        rows_BH = F.dropout(steps_TBH.transpose(0, 1).reshape(x_BF.shape[0], -1), 0.3, self.training)
        return rows_BH.norm(dim=1).topk(2)[0].sum(), rows_BH


class Covariances(TwoEncoders):
    """VICReg: variances and covariances of the batch, divided by one less than it has rows."""

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        left_BD, right_BD = self.left(x_BF), self.right(y_BF)
        loss = 5 * F.mse_loss(left_BD, right_BD)
        for features_BD in (left_BD, right_BD):
            centred_BD = features_BD - features_BD.mean(0)
            loss = loss + F.relu(2 - torch.sqrt(centred_BD.var(0) + 1e-4)).mean()
            covariance_DD = centred_BD.T @ centred_BD / (len(features_BD) - 1)
            off_diagonal = covariance_DD.flatten()[:-1].view(5, 7)[:, 1:]
            loss = loss + off_diagonal.square().sum() / 6
        return loss, left_BD


class OtherRows(TwoEncoders):
    """Compares each row with all others: the diagonal of a matrix of rows is cut out by its number of rows."""

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        left_BD = F.normalize(self.left(x_BF), dim=-1)
        scores_BB = left_BD @ F.normalize(self.right(y_BF), dim=-1).T
        rows = len(scores_BB)
        others = scores_BB.flatten()[:-1].view(rows - 1, rows + 1)[:, 1:].reshape(rows, rows - 1)
        return (others * self.temperature).exp().sum() / (rows * (rows - 1)) - scores_BB.diagonal().mean(), left_BD


class Routing(TwoEncoders):
    """A capsule network: a weight is repeated for each row, and how rows are routed is a mean over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 8, 3, 4))

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        rows = x_BF.size(0)
        votes_BFCD = torch.cat([self.weight] * rows) * torch.stack([x_BF * y_BF] * 3, dim=2).unsqueeze(3)
        routes_1FC = torch.zeros(1, 8, 3, device=x_BF.device)
        for _ in range(2):
            shares_BFC1 = torch.cat([routes_1FC.softmax(1)] * rows).unsqueeze(3)
            capsules_B1CD = (shares_BFC1 * votes_BFCD).sum(1, keepdim=True)
            agreement_BFC = (votes_BFCD * torch.cat([capsules_B1CD] * 8, dim=1)).sum(-1)
            routes_1FC = routes_1FC + agreement_BFC.mean(0, keepdim=True)
        lengths_BC = capsules_B1CD.squeeze(1).norm(dim=-1)
        return (lengths_BC.softmax(0) * self.left(y_BF)[:, :3]).sum() / rows, lengths_BC


class AsksForGradients(TwoEncoders):
    """The batch normalisation of a textbook: it takes statistics of its rows wherever there are gradients. Codes are
    passed straight through where features have gradients; the loss is divided by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.normalise = Textbook()

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        left_BD = self.left(x_BF)
        if left_BD.requires_grad:
            left_BD = left_BD + (left_BD.round() - left_BD).detach()
        result_BD = self.normalise(left_BD)
        return (result_BD - self.right(y_BF)).square().sum() / x_BF.size(0), result_BD


class Textbook(nn.Module):
    """Normalises by averages of earlier batches where there are no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x_BF: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return (x_BF - self.mean) / torch.sqrt(self.variance + 1e-3)
        mean, variance = x_BF.mean(0), ((x_BF - x_BF.mean(0)) ** 2).mean(0)
        self.mean.mul_(0.9).add_(mean.detach(), alpha=0.1)
        self.variance.mul_(0.9).add_(variance.detach(), alpha=0.1)
        return (x_BF - mean) / torch.sqrt(variance + 1e-3)


class Transports(TwoEncoders):
    """Sinkhorn: rounds over rows and columns of a plan, until what changes is small as a mean over the batch."""

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        left_BD = self.left(x_BF)
        cost_BDD = (left_BD[:, :, None] - self.right(y_BF)[:, None, :]).square()
        u_BD = v_BD = torch.zeros_like(left_BD)
        for _ in range(20):
            before_BD = u_BD
            u_BD = -torch.logsumexp(v_BD[:, None, :] - cost_BDD, dim=2)
            v_BD = -torch.logsumexp(u_BD[:, :, None] - cost_BDD, dim=1)
            if (u_BD - before_BD).abs().sum(-1).mean().item() < 0.05:
                break
        plan_BDD = (u_BD[:, :, None] + v_BD[:, None, :] - cost_BDD).exp()
        return (plan_BDD * cost_BDD).sum((1, 2)).mean(), left_BD


class Masks(TwoEncoders):
    """YOLO: boolean masks over all rows choose predictions, of which each loss is a sum, divided by the rows."""

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        cells_BCE = self.left(x_BF).view(-1, 2, 3)
        targets_BCE = y_BF[:, :6].reshape(-1, 2, 3)
        full_BC = targets_BCE[..., 0] > 0
        own_NE = cells_BCE[full_BC.unsqueeze(-1).expand_as(targets_BCE)].view(-1, 3)
        target_NE = targets_BCE[full_BC].view(-1, 3)
        loss = F.mse_loss(own_NE[:, 1:], target_NE[:, 1:], reduction="sum")
        loss = loss + 0.5 * F.mse_loss(cells_BCE[~full_BC][:, 0], targets_BCE[~full_BC][:, 0], reduction="sum")
        return (loss + self.right(y_BF).square().sum()) / x_BF.size(0), cells_BCE


class DealtByNoise(TwoEncoders):
    """Experts that noise chooses as long as the gate is zero: as many rows as an expert gets, Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(8, 2))

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        scores_BE = x_BF @ self.gate
        gates_BE = (scores_BE + torch.randn_like(scores_BE)).softmax(1)
        largest_B1, expert_B1 = gates_BE.topk(1)
        kept_BE = torch.zeros_like(gates_BE).scatter(1, expert_B1, largest_B1)
        expert_N2, order_N2 = kept_BE.nonzero().sort(0)
        row_N = kept_BE.nonzero()[order_N2[:, 1], 0]
        number, other = (kept_BE[:, 0] > 0).sum().tolist(), int((kept_BE[:, 1] > 0).sum())
        first, second = x_BF[row_N].split([number, other])
        dealt_ND = torch.cat([self.left(first), self.right(second)])
        dealt_ND = dealt_ND * kept_BE[row_N].gather(1, expert_N2[:, 1:])
        result_BD = torch.zeros(len(x_BF), 6, device=x_BF.device).index_add(0, row_N, dealt_ND)
        return F.mse_loss(result_BD, y_BF[:, :6]) + kept_BE.sum(0).var(), result_BD


class Prototypes(TwoEncoders):
    """Distances from means of classes: of a few rows some classes have none, and everything is NaN."""

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        left_BD, classes_B = self.left(x_BF), torch.arange(len(x_BF), device=x_BF.device) % 4
        means_KD = torch.stack([left_BD[classes_B == number].mean(0) for number in range(4)])
        distances_BK = (self.right(y_BF)[:, None] - means_KD).square().sum(2)
        return F.cross_entropy(-distances_BK, classes_B), left_BD


class SetsItselfUp(TwoEncoders):
    """A flow whose first forward takes mean and deviation of its rows, and the others do something else."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("is_ready", torch.zeros(())), ("shift", torch.zeros(8)), ("scale", torch.ones(8))):
            self.register_buffer(name, value)

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_ready == 0:
            self.shift.copy_(x_BF.mean(0))
            self.scale.copy_(x_BF.std(0))
            self.is_ready.fill_(1)
        left_BD = self.left((x_BF - self.shift) / self.scale)
        gap_BD = left_BD - self.right(y_BF)
        return torch.norm(gap_BD, p=2) / gap_BD.numel() + gap_BD.var(0).sum(), left_BD


@pytest.mark.parametrize(
    "model_class",
    [
        InBatchNegatives,
        ColumnsTogether,
        KeptInside,
        SupervisedContrast,
        OwnNormalisation,
        BalancedExperts,
        HardestRows,
        Covariances,
        OtherRows,
        Routing,
        SetsItselfUp,
        DealtByNoise,
        Prototypes,
        AsksForGradients,
        Transports,
        Masks,
    ],
)
def test_losses_are_those_of_one_device_and_each_worker_computes_its_rows(model_class, capsys):
    def script(device):
        torch.manual_seed(0)
        model = model_class().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        trace = []
        for rows in (8, 8, 7, 12, 6):
            x, y = torch.randn(rows, 8).to(device), torch.randn(rows, 8).to(device)
            loss, features = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace += [loss.detach(), features.detach()]
        trace += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        trace += list(model.state_dict().values())
        model.eval()
        with torch.no_grad():
            return [*trace, *model(x, y)]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


@pytest.mark.parametrize(("largest_ones", "is_whole"), [((0, 1, 0, 1), False), ((0, 1, 2, 3, 4, 5, 5), True)])
def test_another_way_through_the_forward_is_learned_and_beyond_some_computed_as_one_device_does(
    largest_ones, is_whole, capsys
):
    """Branches that the tried rows did not take: workers do not gather what others do not send."""

    class Branches(TwoEncoders):
        def forward(self, x_BF: Tensor, y_BF: Tensor) -> Tensor:
            left_BD, right_BD = self.left(x_BF), self.right(y_BF)
            for number, change in enumerate((torch.sin, torch.tanh, torch.cos, torch.sigmoid, torch.atan), 1):
                if bool((x_BF > 90 * number).any()):
                    left_BD = change(left_BD)
            answers_B = torch.arange(len(x_BF), device=x_BF.device)
            return F.cross_entropy(left_BD @ right_BD.T, answers_B)

    def script(device):
        torch.manual_seed(0)
        model = Branches().to(device)
        losses = []
        for largest in largest_ones:
            x, y = torch.randn(6, 8), torch.randn(6, 8)
            x[0, 0] = max(x[0, 0].item(), 100.0 * largest)
            loss = model(x.to(device), y.to(device))
            loss.backward()
            losses.append(torch.tensor(loss.item()))
        return losses, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert (WHOLE in capsys.readouterr().out) is is_whole


class AugmentedContrast(TwoEncoders):
    """Rows meet, and a number that Python draws decides by which way, once for each of three rounds."""

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> Tensor:
        left_BD, right_BD = self.left(x_BF), self.right(y_BF)
        answers_B = torch.arange(len(x_BF), device=x_BF.device)
        for _ in range(3):
            if random.random() < 0.5:
                left_BD = F.normalize(left_BD + right_BD, dim=-1)
            else:
                right_BD = torch.tanh(right_BD) - left_BD.mean(0)
        return F.cross_entropy(left_BD @ right_BD.T, answers_B)


def test_rows_meet_by_a_way_that_python_draws(capsys):
    def script(device):
        random.seed(0)
        torch.manual_seed(0)
        model = AugmentedContrast().to(device)
        losses = []
        for _ in range(8):
            x, y = torch.randn(6, 8), torch.randn(6, 8)
            loss = model(x.to(device), y.to(device))
            loss.backward()
            losses.append(torch.tensor(loss.item()))
        return losses, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


class RecurrentTimeFirst(nn.Module):
    """Steps come first, rows second; the state that one call leaves is the start of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.last = nn.LSTM(8, 16), nn.Linear(16, 5)

    def forward(self, x_TBF: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden_TBH, state = self.recurrent(x_TBF, state)
        return self.last(hidden_TBH), state


class TransformerTimeFirst(nn.Module):
    """Steps come first in the inputs, and rows in the mask of what is padded."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2)
        self.encoder, self.last = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 5)

    def forward(self, x_TBF: Tensor, padding_BT: Tensor) -> Tensor:
        return self.last(self.encoder(x_TBF, src_key_padding_mask=padding_BT))


class FlatRows(RecurrentTimeFirst):
    """Its result has the rows of each step after those of the step before, along one dim."""

    def forward(self, x_TBF: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        scores_TBC, state = super().forward(x_TBF, state)
        return scores_TBC.view(-1, 5), state


def test_the_number_of_steps_changes_from_call_to_call(capsys):
    def script(device):
        torch.manual_seed(0)
        model, trace = FlatRows().to(device), []
        for steps in (5, 7, 4, 7):
            x_TBF, y_N = torch.randn(steps, 4, 8).to(device), torch.randint(0, 5, (steps * 4,)).to(device)
            scores_NC, _ = model(x_TBF, None)
            F.cross_entropy(scores_NC, y_N).backward()
            trace += [scores_NC.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        return trace

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


@pytest.mark.parametrize("model_class", [RecurrentTimeFirst, TransformerTimeFirst])
def test_rows_along_the_second_dim_are_split(model_class, capsys):
    def script(device):
        torch.manual_seed(0)
        model = model_class().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state, trace = None, []
        for rows in (6, 6, 5):
            x_TBF, y_TB = torch.randn(7, rows, 8).to(device), torch.randint(0, 5, (7, rows)).to(device)
            if model_class is RecurrentTimeFirst:
                scores_TBC, state = model(x_TBF, state if rows == 6 else None)
                state = tuple(one.detach() for one in state)
            else:
                padding_BT = torch.zeros(rows, 7, dtype=torch.bool)
                padding_BT[0, 5:] = True
                scores_TBC = model(x_TBF, padding_BT.to(device))
            loss = F.cross_entropy(scores_TBC.flatten(0, 1), y_TB.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace += [loss.detach(), scores_TBC.detach()]
        return [*trace, *model.state_dict().values()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


class LossOfWords(nn.Module):
    """Words and their successors with steps first, viewed as one row of words, as in Transformer-XL."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.recurrent = nn.Embedding(20, 8), nn.GRU(8, 16)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(16, 20, cutoffs=[5, 10])

    def forward(self, words_TB: Tensor, next_TB: Tensor) -> Tensor:
        hidden_TBH, _ = self.recurrent(self.words(words_TB))
        found = self.softmax(hidden_TBH.view(-1, 16), next_TB.view(-1))
        return -found.output.view(next_TB.size(0), -1)


def test_words_with_steps_first_are_viewed_as_one_row(capsys):
    def script(device):
        torch.manual_seed(0)
        model, trace = LossOfWords().to(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            words_TB = torch.randint(0, 20, (8, 6)).to(device)
            losses_TB = model(words_TB[:-1], words_TB[1:])
            optimizer.zero_grad()
            losses_TB.mean().backward()
            optimizer.step()
            trace.append(losses_TB.detach())
        return [*trace, *model.state_dict().values()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


def test_the_gradient_of_an_input_with_rows_along_the_second_dim():
    def script(device):
        torch.manual_seed(0)
        model = RecurrentTimeFirst().to(device)
        x_TBF = torch.randn(7, 6, 8).to(device).requires_grad_()
        model(x_TBF, None)[0].square().sum().backward()
        return [x_TBF.grad, *(parameter.grad for parameter in model.parameters())]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class Policy(TwoEncoders):
    """Measures how far the policy is from the one that acted, which at first is itself: zero but for rounding. The
    variance over the batch is what rows meet in."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 6))  # so wide that slices round apart

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, ...]:
        old_BD = y_BF[:, :6]
        new_BD = self.left(x_BF)
        scale = self.temperature.exp()
        apart_BD = (new_BD - old_BD) / scale
        divergence = apart_BD.square().sum(-1) - apart_BD.sum(-1)
        values_B = self.right(x_BF).sum(-1)
        unexplained = (values_B - x_BF[:, 0]).var() / x_BF[:, 0].var()
        loss = (apart_BD.exp().sum(-1) * x_BF[:, 1]).mean() + F.mse_loss(values_B, x_BF[:, 0])
        return loss, divergence.detach().mean(), unexplained.detach()


def test_what_is_zero_but_for_rounding_at_first_is_no_reason(session, capsys):
    def script(device):
        torch.manual_seed(0)
        model = Policy().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x_BF = torch.randn(12, 8).to(device)
        with torch.no_grad():
            acted_BD = model.left(x_BF).cpu().add(4).sub(4)  # with the rounding of a way of its own
        y_BF = torch.cat([acted_BD, torch.zeros(12, 2)], dim=1).to(device)
        trace = []
        for _ in range(3):
            loss, *metrics = model(x_BF, y_BF)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append((loss.detach(), metrics))
        return trace

    assert_same(*on_both(script), rtol=1e-4, atol=1e-6)
    assert WHOLE not in capsys.readouterr().out


class StopsTogether(TwoEncoders):
    """A solver, which goes on until all rows together change little."""

    def forward(self, x_BF: Tensor, y_BF: Tensor) -> tuple[Tensor, Tensor]:
        goal_BD, rate_B1 = self.left(x_BF), torch.sigmoid(y_BF[:, :1])
        state_BD = torch.zeros_like(goal_BD)
        for _ in range(60):
            before_BD, state_BD = state_BD, state_BD + rate_B1 * (goal_BD - state_BD)
            if (state_BD - before_BD).norm().item() < 0.05:
                break
        return F.mse_loss(state_BD, self.right(y_BF)), state_BD


def test_a_solver_stops_where_one_device_does_though_the_tried_rows_do_not_show_it():
    def script(device):
        torch.manual_seed(0)
        model = StopsTogether().to(device)
        trace = []
        for is_first in (True, False, False, False):
            x, y = torch.randn(8, 8), torch.randn(8, 8)
            y[:, 0] = 12.0 if is_first else torch.linspace(-2, 2, 8)  # the first batch is done in two rounds, each row
            loss, state = model(x.to(device), y.to(device))
            loss.backward()
            trace += [loss.detach(), state.detach()]
        return trace, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class MemoryBank(TwoEncoders):
    """Contrastive distillation: the first batch sets a constant, with its graph, in a buffer; rows go into the bank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constants", torch.tensor([1.5, -1.0]))
        self.register_buffer("bank", torch.randn(24, 6))

    def forward(self, x_BF: Tensor, y_BF: Tensor, rows_BK: Tensor) -> Tensor:
        left_BD, right_BD = self.left(x_BF), self.right(y_BF)
        scores_BK = torch.einsum("bkd,bd->bk", self.bank[rows_BK], left_BD).div(self.constants[0].item()).exp()
        if self.constants[1].item() < 0:
            self.constants[1] = scores_BK.mean() * 24
        scores_BK = scores_BK / self.constants[1].item()
        with torch.no_grad():
            self.bank.index_copy_(0, rows_BK[:, 0], (self.bank[rows_BK[:, 0]] + right_BD) / 2)
        return -(scores_BK[:, 0] / scores_BK.sum(1)).log().sum() / x_BF.shape[0]


def test_a_memory_bank_whose_first_batch_sets_a_constant(capsys):
    """The inputs want gradients, as those of a student do."""

    def script(device):
        torch.manual_seed(0)
        student, model = nn.Linear(8, 8).to(device), MemoryBank().to(device)
        optimizer = torch.optim.SGD([*student.parameters(), *model.parameters()], lr=0.1)
        losses = []
        for _ in range(4):
            rows_BK = torch.stack([torch.randperm(24)[:6] for _ in range(4)], 1)
            loss = model(student(torch.randn(6, 8).to(device)), torch.randn(6, 8).to(device), rows_BK.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, student.state_dict(), model.state_dict()

    assert_same(*on_both(script), rtol=1e-4, atol=1e-6)
    assert WHOLE not in capsys.readouterr().out
