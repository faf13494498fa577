"""What training scripts do beside forward, backward and step: each exact against the same code on the CPU."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from one_line_models import (
    Bag,
    Flattened,
    InABag,
    OneRowAfterAnother,
    OwnTransformer,
    ragged_batches,
    tiny_gpt2,
    tiny_llama,
)
from rotating import rotating_from
from torch import Tensor, nn

from moreh_ap.device import disable
from moreh_ap.errors import ExactnessError, UnsupportedError
from moreh_ap.local import garbage_at_start

PLANS = rotating_from(1, ["replicate=2", "shard=2"])


@pytest.fixture(params=PLANS, autouse=True)
def session(request, accelerator):
    return accelerator(request.param)


once = pytest.mark.parametrize("session", PLANS[:1], indirect=True)
"""For what no plan can change: what a script is told, and tests that choose a plan themselves."""


def on_both(script):
    """Run ``script(device)`` from the same seed on the CPU and on the accelerator; returns both results."""
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        results.append(script(device))
    return results


def numbers(tree):
    """Every tensor of `tree` as a CPU tensor."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), tree)


def assert_same(expected, got, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(numbers(got), numbers(expected), rtol=rtol, atol=atol)


def train_step(trace, model, optimizer, loss):
    """Trains a step and adds its loss to `trace`, before the first one also all gradients."""
    optimizer.zero_grad()
    loss.backward()
    if not trace:
        trace += [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    trace.append(loss.detach())


def batches(device, count=4, rows=5):
    return [(b["input_ids"].to(device), b["labels"].to(device)) for b in ragged_batches(count, rows)]


def test_accumulation_clipping_and_schedule():
    def script(device):
        model = OwnTransformer().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        trace = []
        for _ in range(3):
            for ids, labels in batches(device):
                (model(ids, labels)[1] / 4).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            trace.append((norm, schedule.get_last_lr()[0]))
        return trace, model.state_dict()

    assert_same(*on_both(script))


class FourierLayer(nn.Module):
    """Complex weights for the low frequencies, beside real layers."""

    def __init__(self, width=6, modes=3):
        super().__init__()
        self.modes = modes
        self.weights = nn.ParameterList(0.1 * torch.randn(width, width, modes, dtype=torch.cfloat) for _ in range(2))
        self.inlet, self.head = nn.Linear(2, width), nn.Linear(width, 1)

    def forward(self, x):
        """[rows, points, 2] -> [rows, points]"""
        hidden = self.inlet(x).transpose(1, 2)
        for weight in self.weights:
            frequencies = torch.fft.rfft(hidden)
            kept = torch.einsum("rim,iom->rom", frequencies[..., : self.modes], weight)
            hidden = hidden + torch.fft.irfft(kept, n=hidden.shape[-1])
        return self.head(hidden.transpose(1, 2)).squeeze(-1)


def test_complex_weights_beside_real_ones():
    def script(device):
        model = FourierLayer().to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
        losses = []
        for _ in range(4):
            x, y = torch.randn(5, 16, 2).to(device), torch.randn(5, 16).to(device)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return torch.tensor(losses), model.state_dict()

    assert_same(*on_both(script))


def test_a_model_trains_at_once_after_it_was_frozen():
    def script(device):
        model, trace = OwnTransformer().to(device), []
        for ids, labels in batches(device, count=2):
            model.requires_grad_(False)  # as PEFT's adapters are while they are disabled
            trace.append(model(ids, labels)[1])
            model.requires_grad_(True)
            model(ids, labels)[1].backward()
            trace.append([parameter.grad for parameter in model.parameters()])
        return trace

    assert_same(*on_both(script))


@once
def test_objects_older_than_the_line_are_collected_again_after_the_first_call(session):
    model = tiny_llama().to("cuda")
    token_ids = torch.randint(0, 64, (4, 8)).to("cuda")
    garbage_at_start.leave_out_older_objects()
    model(token_ids)
    assert gc.get_freeze_count() > 0
    model(token_ids)
    assert gc.get_freeze_count() == 0


def test_several_forwards_before_one_backward():
    def script(device):
        model = OwnTransformer().to(device)
        first, second, third, _ = (model(ids, labels)[1] for ids, labels in batches(device))
        (first + 2 * second * third).backward()
        return [parameter.grad for parameter in model.parameters()], first, second

    assert_same(*on_both(script))


class ListedParameters(nn.Sequential):
    """Its own `parameters` gives a list."""

    def parameters(self, recurse: bool = True) -> list[nn.Parameter]:
        return list(super().parameters(recurse))


class Learner(nn.Module):
    """Its forward is a step of training: gradients for fast weights, a loss of these, the step of an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.network = ListedParameters(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.05)

    def forward(self, x_BF: Tensor, y_B: Tensor) -> float:
        weights = list(self.network.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(self.network(x_BF), y_B), weights)
        fast = [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients)]
        hidden_BH = F.linear(x_BF, fast[0], fast[1]).tanh()
        loss = F.cross_entropy(F.linear(hidden_BH, fast[2], fast[3]), y_B)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def test_a_forward_that_trains_runs_in_the_script_and_its_network_on_the_workers(session, capsys):
    def script(device):
        learner = Learner().to(device)
        rows = [(torch.randn(6, 6).to(device), torch.randint(0, 3, (6,)).to(device)) for _ in range(4)]
        return [torch.tensor(learner(*batch)) for batch in rows], list(learner.parameters())

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert "Every device computes the whole batch" not in capsys.readouterr().out


class Tagger(nn.Module):
    """A method beside `forward` calls its layers one by one, with packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.last = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def scores(self, x_BTF: Tensor, lengths_B: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x_BTF, lengths_B, batch_first=True, enforce_sorted=False)
        hidden_BTH, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return self.last(hidden_BTH)


def test_packed_sequences_go_to_a_layer_and_come_back():
    def script(device):
        tagger = Tagger().to(device)
        x_BTF, lengths_B = torch.randn(4, 7, 6).to(device), torch.tensor([3, 7, 2, 5])
        scores_BTC = tagger.scores(x_BTF, lengths_B)
        scores_BTC.square().sum().backward()
        return scores_BTC, [parameter.grad for parameter in tagger.parameters()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


def test_gradients_are_there_to_read_change_and_clear():
    def script(device):
        model = OwnTransformer().to(device)
        ids, labels = batches(device)[0]
        seen = []
        for set_to_none in (True, False):
            model(ids, labels)[1].backward()
            for parameter in model.parameters():
                parameter.grad.mul_(2)
            seen.append([parameter.grad.clone() for parameter in model.parameters()])
            seen.append([parameter.grad.norm() for parameter in model.parameters()])
            model.zero_grad(set_to_none=set_to_none)
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        model.head.weight.grad = torch.ones_like(model.head.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer.step()
        return seen, model.state_dict()

    assert_same(*on_both(script))


def test_weights_stepped_by_hand():
    def script(device):
        model = OwnTransformer().to(device)
        for ids, labels in batches(device):
            model(ids, labels)[1].backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            model.embedding.weight.data[3].fill_(0.25)
        return model.state_dict()

    assert_same(*on_both(script))


def test_unused_and_frozen_parameters():
    def script(device):
        model = OwnTransformer().to(device)
        model.spare = nn.Linear(3, 3).to(device)
        for parameter in model.blocks[0].parameters():
            parameter.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)
        seen = []
        for step, (ids, labels) in enumerate(batches(device)):
            if step == 2:
                for parameter in model.blocks.parameters():
                    parameter.requires_grad_(not parameter.requires_grad)
            model(ids, labels)[1].backward()
            seen.append([name for name, parameter in model.named_parameters() if parameter.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
        return seen, model.state_dict()

    expected, got = on_both(script)
    assert expected[0] == got[0]
    assert_same(expected[1], got[1])


class Experts(nn.Module):
    """Adds to each row what its expert makes of it; an expert without a row does not run."""

    def __init__(self, make_expert):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.experts = nn.ModuleList(make_expert() for _ in range(3))

    def forward(self, x, chosen):
        out = x * self.scale
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                out = out + expert(x) * (chosen == number)[:, None]
        return out


@pytest.mark.parametrize(
    "make_expert",
    rotating_from(1, [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))]),
    ids=["layers", "blocks"],
)
def test_a_step_may_reach_fewer_parameters_than_the_first(make_expert):
    def script(device):
        model = Experts(make_expert).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []

        def look():
            seen.append([None if weight.grad is None else weight.grad.clone() for weight in model.parameters()])

        for step, chosen in enumerate(("0120", "0011", "2222", "0120", "0000", "1112")):
            x = torch.randn(4, 4)
            model(x.to(device), torch.tensor(list(map(int, chosen))).to(device)).square().sum().backward()
            if step % 2:
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.4)
            look()
            optimizer.step()
            if step != 3:  # two steps add up
                optimizer.zero_grad()
            if step == 3:
                next(model.experts[0].parameters()).grad = None
            if step == 4:
                model.scale.grad = torch.ones(4).to(device)
            look()
        return seen, model.state_dict()

    assert_same(*on_both(script))


class OptionalLabels(nn.Module):
    """A second loss for the rows that have a second label, if there are any; else, in one form, another loss."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x, labels, second):
        has_label = second >= 0
        loss = 0
        if has_label.any():
            loss = F.cross_entropy(self.second(x[has_label]), second[has_label])
        elif self.form == "another loss":
            loss = self.second(x).pow(2).mean()
        scores = self.first(x)
        if self.form == "outside":
            return scores[:, None].repeat(1, 20000, 1), loss
        return loss + F.cross_entropy(scores, labels)


def losses_and_weights(model, loss_of, batches, lr=0.1):
    """What a step of `model` with each of `batches` gives; ``loss_of(batch)`` is the loss of one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for batch in batches:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, model.state_dict()


def train_with_optional_labels(form, device):
    model = OptionalLabels(form).to(device)

    def loss_of(second):
        x, labels = torch.randn(4, 6).to(device), torch.randint(3, (4,)).to(device)
        result = model(x, labels, torch.tensor(second).to(device))
        if form != "outside":
            return result
        scores, second_loss = result
        return F.cross_entropy(scores.reshape(-1, 3), labels.repeat_interleave(20000)) + second_loss

    seconds = [1, 2, 0, 1], [1, 0, 2, 2], [1, 0, -1, -1], [-1, -1, 2, 0], [-1, -1, -1, -1], [0, 1, 2, 1]
    return losses_and_weights(model, loss_of, seconds)


@pytest.mark.parametrize("form", rotating_from(1, ["no loss", "another loss"]))
def test_rows_may_decide_which_losses_a_forward_takes(form):
    assert_same(*on_both(lambda device: train_with_optional_labels(form, device)))


class InLists(nn.Module):
    """Layers in lists of lists, some of them None, as some libraries have them, and a question about processes."""

    def __init__(self):
        super().__init__()
        self.layers, self.norms = nn.ModuleList(), nn.ModuleList([None, None])
        for _ in range(2):
            second = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6))
            self.layers.append(nn.ModuleList([nn.Linear(6, 6), second, None]))

    def forward(self, x):
        for first, second, _ in self.layers:
            x = second(first(x) + x)
        if dist.is_initialized() and dist.get_world_size() > 1:
            x = x * dist.get_world_size() + dist.get_rank()
        return x


def test_models_with_lists_of_lists_appear_alone():
    def script(device):
        model = InLists().to(device)
        return losses_and_weights(model, lambda _: model(torch.randn(4, 6).to(device)).square().mean(), range(3))

    assert_same(*on_both(script))


class OptionalPart(nn.Module):
    """Drops something out only if some of its rows have it."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.dropout = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x, has):
        hidden = self.always(x)
        if has.any():
            hidden = hidden + self.dropout(self.sometimes(x)) * has[:, None]
        if (has > 1).any():
            raise LookupError(f"{len(x)} rows, and one has too much")
        return self.dropout(hidden)


def test_rows_may_decide_what_a_forward_draws(session):
    def script(device):
        model = OptionalPart().to(device)

        def loss_of(has):
            return model(torch.randn(4, 6).to(device), torch.tensor(has).to(device)).square().sum()

        which = [1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 0]
        return losses_and_weights(model, loss_of, which, lr=1e-3)

    assert_same(*on_both(script))


@once
def test_an_error_that_the_rows_of_one_worker_raise_is_that_of_one_device(accelerator):
    accelerator("replicate=2")
    model = OptionalPart().cuda()
    x = torch.randn(4, 6).cuda()
    model(x, torch.tensor([1, 1, 1, 1]).cuda())
    with pytest.raises(LookupError, match="4 rows, and one has too much"):
        model(x, torch.tensor([1, 1, 1, 2]).cuda()).sum().item()
    assert model(x, torch.tensor([1, 1, 1, 1]).cuda()).shape == (4, 6)


@once
def test_rows_that_decide_on_losses_too_late_are_an_error():
    """The script has computed with rows of the result, on the workers, before it could know."""
    with pytest.raises(ExactnessError, match="rows decide over which losses"):
        losses, _ = train_with_optional_labels("outside", "cuda")
        [loss.item() for loss in losses]
    disable()  # what the script had gathered behind the error would reach the next test


def test_evaluation_gives_the_logits_of_one_device():
    def script(device):
        model = tiny_llama().to(device)
        results = []
        model.eval()
        with torch.no_grad():
            for batch in ragged_batches(3, 5):
                out = model(input_ids=batch["input_ids"].to(device), attention_mask=batch["attention_mask"].to(device))
                results.append(out.logits)
        assert not results[0].requires_grad
        return results

    assert_same(*on_both(script), atol=1e-5)


def test_state_dicts_save_load_and_resume(tmp_path):
    def script(device):
        model = OwnTransformer().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
        data = batches(device, count=6)

        def steps(model, optimizer, chosen):
            losses = []
            for ids, labels in chosen:
                loss = model(ids, labels)[1]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss)
            return losses

        steps(model, optimizer, data[:3])
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{device}.pt")
        uninterrupted = steps(model, optimizer, data[3:])

        saved = torch.load(tmp_path / f"{device}.pt")
        fresh = OwnTransformer().to(device)
        fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=1.0)
        fresh.load_state_dict(saved["model"])
        fresh_optimizer.load_state_dict(saved["optimizer"])
        resumed = steps(fresh, fresh_optimizer, data[3:])
        assert_same(uninterrupted, resumed)

        saved = torch.load(tmp_path / f"{device}.pt")  # an optimizer steps on the very tensors it has loaded
        model.load_state_dict(saved["model"])  # and into a model and optimizer that are in use
        optimizer.load_state_dict(saved["optimizer"])
        assert_same(uninterrupted, steps(model, optimizer, data[3:]))
        saved = torch.load(tmp_path / f"{device}.pt")
        assert all(tensor.device.type == device for tensor in saved["model"].values())
        saved = torch.load(tmp_path / f"{device}.pt", map_location="cpu")
        return uninterrupted, saved["model"], saved["optimizer"]["state"]

    expected, got = on_both(script)
    assert_same(expected, got)
    assert all(type(tensor) is Tensor for tensor in got[1].values())


def test_a_step_that_reads_nothing_waits_for_nothing(session):
    model = tiny_llama().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = torch.zeros((), device="cuda")
    waits = []
    for batch in ragged_batches(6, 5):
        loss = model(**{key: value.cuda() for key, value in batch.items()}, use_cache=False).loss
        (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        waits.append(session.workers.num_waits)
    assert waits[0] > 0, "waits are counted: the first step had to"
    assert waits[-1] == waits[0], "a later step waited"
    assert total.item() > 0


@once
def test_a_save_reads_many_tensors_in_a_message_and_each_as_it_is_then(session):
    layers = [nn.Linear(512, 512) for _ in range(12)]
    expected, model = nn.Sequential(*copy.deepcopy(layers)), nn.Sequential(*layers).cuda()
    x = torch.rand(4, 512)

    def train(module, optimizer):
        module(x.to(next(module.parameters()).device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    pairs = [(one, torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-2)) for one in (expected, model)]
    for step in range(3):
        for pair in pairs:
            train(*pair)
        before = session.outbox._messages_sent
        files = [io.BytesIO() for _ in pairs]
        for file, (module, optimizer) in zip(files, pairs, strict=True):
            torch.save((module.state_dict(), optimizer.state_dict()), file)
        num_messages = session.outbox._messages_sent - before
        assert num_messages < 24, f"step {step}: {num_messages} messages for 72 tensors"
        ours, theirs = (torch.load(io.BytesIO(file.getvalue()), map_location="cpu") for file in files)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        for first, second in zip(ours[0].values(), [p.cpu() for p in model.parameters()], strict=True):
            torch.testing.assert_close(first, second.detach(), rtol=1e-4, atol=1e-6)


def test_results_nest_in_the_user_s_own_dataclass():
    def script(device):
        model = InABag().to(device)
        ids, labels = batches(device)[0]
        out = model(ids, labels)
        assert type(out) is Bag
        out.loss.backward()
        return out.logits, out.loss, [p.grad for p in model.parameters()]

    assert_same(*on_both(script))


class ResultTwice(nn.Module):
    """Its last hidden state is its output too, as of models of transformers that return all hidden states."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x).tanh()
        output = self.second(hidden)
        return {"output": output, "hidden": (hidden, output), "sizes": (4, 4)}


@pytest.mark.parametrize("session", [*PLANS, "shard=2,micro_batches=2"], indirect=True)
def test_a_tensor_that_is_in_a_result_twice_is_one_object(session):
    def script(device):
        model = ResultTwice().to(device)
        optimizer, trace = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            result = model(torch.randn(8, 6).to(device))
            assert result["output"] is result["hidden"][1] is not result["hidden"][0]
            train_step(trace, model, optimizer, result["output"].square().mean() + result["hidden"][1].sum() / 9)
            with torch.no_grad():
                result = model(torch.randn(8, 6).to(device))
                result["output"].add_(1)
                trace.append(result["hidden"][1])
        return trace

    assert_same(*on_both(script))


def test_rows_may_have_several_entries(capsys):
    def script(device):
        model = Flattened().to(device)
        ids, labels = batches(device)[0]
        logits = model(ids)
        nn.functional.cross_entropy(logits, labels.flatten()).backward()
        return logits, [p.grad for p in model.parameters()]

    assert_same(*on_both(script))
    assert "Every device computes the whole batch" not in capsys.readouterr().out


def test_rows_that_look_at_each_other_are_not_split(capsys):
    def script(device):
        torch.manual_seed(0)
        model = OneRowAfterAnother().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, labels = torch.randn(6, 8).to(device), torch.tensor([0, 1, 2, 0, 1, 2]).to(device)
        losses = []
        for _ in range(3):
            loss = model(x, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return losses, model.state_dict()

    assert_same(*on_both(script))
    assert "Every device computes the whole batch" in capsys.readouterr().out


def test_gradients_reach_inputs_and_parts_can_be_called():
    def script(device):
        model = OwnTransformer().to(device)
        ids, labels = batches(device)[0]
        hidden = model.embedding(ids)
        hidden = model.blocks[1](hidden + 1)
        loss = nn.functional.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten())
        loss.backward()
        given = torch.ones(4, 32, requires_grad=True, device=device)
        model.blocks[0](given).pow(2).sum().backward()
        return loss, given.grad, [p.grad for p in model.parameters()]

    assert_same(*on_both(script), atol=1e-5)


def test_leaving_the_accelerator(tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = tiny_llama()
    reference = copy.deepcopy(model)
    ids = torch.arange(12).reshape(2, 6)
    model.cuda()
    model(ids.cuda(), labels=ids.cuda()).loss.backward()
    model.save_pretrained(tmp_path / "on_accelerator")
    model.to("cpu")
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    model.save_pretrained(tmp_path / "on_cpu")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    expected = reference(ids).logits
    assert_same(expected, model(ids).logits)
    for folder in ("on_accelerator", "on_cpu"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert_same(expected, loaded(ids).logits)


def test_a_saved_checkpoint_is_read_by_the_workers_alone(tmp_path, monkeypatch):
    """Under a path that is relative to where the script was when it named it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    reference = tiny_gpt2()
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        model = AutoModelForCausalLM.from_pretrained("./")
    from moreh_ap.device.tensor import VirtualTensor
    from moreh_ap.device.values import InFile

    assert all(isinstance(p, VirtualTensor) and isinstance(p._cell.value, InFile) for p in model.parameters())
    batch = ragged_batches(1, 5)[0]
    there = model(**{key: value.cuda() for key, value in batch.items()})  # no .cuda(): its inputs decide
    assert next(model.parameters()).is_cuda
    assert_same(reference(**batch).loss, there.loss)


def test_parameters_meet_buffers_outside_of_the_model():
    """As pruning has them: under a sharded plan one is a part, the other whole."""

    def script(device):
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        model[0].register_buffer("mask", (torch.arange(20).reshape(5, 4) % 3 > 0).float())
        model, x = model.to(device), torch.ones(6, 4).to(device)
        model(x).sum().backward()
        layer = model[0]
        with torch.no_grad():
            pruned = layer.weight * layer.mask
            layer.weight.mul_(layer.mask)
            layer.mask.add_(layer.weight)
            gradient = layer.weight.grad * layer.mask
        return pruned.cpu(), model(x).detach().cpu(), layer.mask.cpu(), layer.weight.detach().cpu(), gradient.cpu()

    assert_same(*on_both(script), atol=1e-5)


@once
def test_a_loaded_model_may_stay_on_the_cpu(tmp_path):
    from transformers import AutoModelForCausalLM

    reference = tiny_llama()
    reference.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(10).reshape(2, 5)
    assert_same(reference(ids).logits, model(ids).logits)
    assert type(next(model.parameters())) is nn.Parameter


@once
@pytest.mark.parametrize("device_map", rotating_from(1, ["auto", "cuda", {"": 0}]))
def test_a_device_map_is_a_hint(device_map, tmp_path):
    """C23: accepted, whatever it says."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    reference = tiny_llama()
    reference.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    batch = ragged_batches(1, 5)[0]
    there = model(**{key: value.cuda() for key, value in batch.items()}).loss
    assert_same(reference(**batch).loss, there)


def test_generation_is_that_of_one_device():
    def script(device):
        model = tiny_llama().to(device).eval()
        prompt = torch.tensor([[5, 6, 7], [9, 8, 7], [1, 2, 3]], device=device)
        mask = torch.ones_like(prompt)
        greedy = model.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
        beams = model.generate(prompt[:1], attention_mask=mask[:1], max_new_tokens=4, num_beams=2, pad_token_id=0)
        torch.manual_seed(3)
        sampled = model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=True, pad_token_id=0)
        return greedy, beams, sampled

    assert_same(*on_both(script))


@once
def test_generation_beyond_a_model_s_positions_is_the_error_of_one_device():
    def script(device):
        model = tiny_gpt2().to(device).eval()
        prompt = 1 + torch.arange(60, device=device).remainder(20).expand(3, -1)
        how = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
        with pytest.raises(IndexError, match="index out of range"):
            model.generate(prompt, max_new_tokens=9, min_new_tokens=9, **how)
        return model.generate(prompt, max_new_tokens=3, min_new_tokens=3, **how)

    assert_same(*on_both(script))


def test_settings_changed_after_the_first_call_are_followed():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.factor = nn.Linear(4, 4), 1.0

        def forward(self, x):
            return self.linear(x) * self.factor

    def script(device):
        model, x = Scaled().to(device), torch.ones(4, 4, device=device)
        first = model(x)
        model.factor = 3.0
        second = model(x)
        model.linear = nn.Linear(4, 4).to(device)
        return first, second, model(x)

    assert_same(*on_both(script))


class Centred(nn.Module):
    """Rows look at each other when asked to, by an argument or by an attribute; a buffer may watch them."""

    def __init__(self):
        super().__init__()
        self.linear, self.always, self.watch = nn.Linear(4, 4), False, False
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x, center=False):
        if self.watch:
            self.seen.add_(x.detach().max(0).values)
        hidden = self.linear(x)
        return hidden - hidden.max(0).values if center or self.always else hidden


def test_each_kind_of_call_has_its_own_split_check():
    def script(device):
        torch.manual_seed(0)
        model, x = Centred().to(device), torch.randn(6, 4).to(device)
        results = [model(x), model(x, center=True), model(x)]
        model.always = True
        results.append(model(x))
        model.always, model.watch = False, True
        results += [model(x), model(2 * x)]
        return results, model.seen

    assert_same(*on_both(script))


def test_lists_of_losses_become_tensors():
    def script(device):
        model, (batch, *_) = OwnTransformer().to(device), batches(device)
        losses = [model(*batch)[1].detach() for _ in range(2)]
        return torch.Tensor(losses), torch.tensor(losses), torch.Tensor([[losses[0], 1.0], [2, losses[1]]]).mean()

    assert_same(*on_both(script))


def test_a_second_backward_needs_its_graph():
    model = OwnTransformer().cuda()
    ids, labels = batches("cuda")[0]
    loss = model(ids, labels)[1]
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
        torch.cuda.synchronize()


def test_hooks_on_modules_come_and_go_with_the_script():
    def script(device):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device), torch.ones(4, 4, device=device)
        results = [model(x)]
        handle = model[0].register_forward_hook(lambda module, args, output: output + 1)
        results.append(model(x))
        handle.remove()
        return [*results, model(x)]

    assert_same(*on_both(script))


def test_hooks_on_parameters_get_and_change_the_gradients_of_a_backward():
    def script(device):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(4, 4)
        first, _, last = model
        first.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # the model moves afterwards
        removed = first.bias.register_hook(lambda gradient: gradient * 9)
        model.to(device)
        removed.remove()
        seen, x = [], x.to(device)
        last.bias.register_hook(lambda gradient: seen.append(gradient.clone()))
        last.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
        for _ in range(2):
            model(x).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        asked = torch.autograd.grad(model(x).square().mean(), [first.weight, first.bias])
        return [*sorted(seen, key=lambda one: one.ndim), *gradients, *asked]

    assert_same(*on_both(script))


def test_transformers_record_hidden_states():
    def script(device):
        model = tiny_llama().to(device)
        out = model(ragged_batches(1, 5)[0]["input_ids"].to(device), output_hidden_states=True)
        return list(out.hidden_states)

    assert_same(*on_both(script), atol=1e-5)


def test_an_error_in_forward_is_raised_at_its_line_with_its_type():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            if x.shape[1] == 3:
                raise KeyError("no rows of three")
            return self.linear(x)

    model = Picky().cuda()
    with pytest.raises(KeyError, match="no rows of three") as failure:
        model(torch.ones(4, 3).cuda())
    assert "raise KeyError" in str(failure.value.__cause__)
    assert model(torch.ones(4, 4).cuda()).shape == (4, 4), "the workers are as good as before"
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.ones(4, 5).cuda())


@once
def test_the_accelerator_answers_as_one_device(session):
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    assert torch.cuda.get_device_name() == "MoAI Accelerator"
    assert torch.cuda.get_device_properties(0).name == "MoAI Accelerator"
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory
    model = nn.Linear(2048, 2048).cuda()
    torch.cuda.reset_peak_memory_stats()
    model(torch.ones(2, 2048).cuda()).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() > 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] > 0
    assert torch.cuda.memory.max_memory_allocated() > 0 and torch.cuda.memory.mem_get_info()[1] == total
    torch.cuda.memory.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(0.5)
    assert not torch.cuda.is_current_stream_capturing()
    waits, messages = session.workers.num_waits, session.outbox._messages_sent
    torch.cuda.empty_cache()
    assert session.workers.num_waits == waits and session.outbox._messages_sent == messages + 1, "it waits for nothing"
    assert torch.cuda.is_bf16_supported() in (True, False)


def test_dropout_is_reproduced_by_the_seed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).cuda()
    x = torch.ones(64, 16).cuda()
    torch.manual_seed(5)
    first, second = model(x).cpu(), model(x).cpu()
    torch.manual_seed(5)
    again = model(x).cpu()
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert not torch.equal(first[:32], first[32:]), "workers drop different units"
    assert 0.4 < (first == 0).float().mean() < 0.6


class MakesTensors(nn.Module):
    """A forward that makes tensors of the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.linspace(0, 1, 8, device=x.device) / 3


def test_the_default_dtype_of_the_process_is_that_of_forwards():
    def script(device):
        model = MakesTensors().to(device)
        return model(torch.ones(4, 8).to(device))

    torch.set_default_dtype(torch.float64)
    try:
        assert_same(*on_both(script), rtol=1e-12, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(*on_both(script))


class LoadedWhenUsed:
    """Stands for a tensor in a file, as what Lightning Fabric gives to `load_state_dict` does."""

    def __init__(self, value):
        self.value, self.shape = value, value.shape

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*(arg.value if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


@once
def test_a_parameter_takes_values_from_what_stands_for_a_tensor(accelerator):
    accelerator("replicate=2")

    def script(device):
        model, value = nn.Linear(3, 2).to(device), torch.arange(6.0).view(2, 3)
        for step in range(2):  # before and after the workers have it
            with torch.no_grad():
                model.weight.copy_(LoadedWhenUsed(value + step))
            loss = model(torch.ones(4, 3, device=device)).square().mean()
            loss.backward()
        model.load_state_dict({"weight": LoadedWhenUsed(value), "bias": torch.zeros(2)})
        return {"loss": loss, "weight": model.weight, "gradient": model.weight.grad}

    assert_same(*on_both(script))


class SparseLookups(nn.Module):
    """Looks up (B, 3) indices in ways whose gradients are sparse on one device."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 6, sparse=True, padding_idx=0)
        self.looked_up, self.gathered = (nn.Parameter(torch.randn(20, 6)) for _ in range(2))

    def forward(self, ids):
        looked_up = F.embedding(ids, self.looked_up, sparse=True).sum(1)
        gathered = torch.gather(self.gathered, 0, ids[:, :1].expand(-1, 6), sparse_grad=True)
        return (self.bag(ids) + looked_up * gathered).tanh()


@once
@pytest.mark.parametrize("optimizer_class", rotating_from(1, [torch.optim.SGD, torch.optim.Adagrad]))
@pytest.mark.parametrize("plan", PLANS)
def test_an_embedding_with_sparse_gradients(accelerator, plan, optimizer_class):
    accelerator(plan)

    def script(device):
        model = SparseLookups().to(device)
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        trace = []
        for _ in range(3):
            loss = model(torch.randint(20, (8, 3)).to(device)).sum(1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss)
        return trace, model.state_dict()

    assert_same(*on_both(script))


@once
def test_sparse_adam_is_refused(accelerator):
    accelerator("replicate=2")
    embedding = nn.Embedding(8, 2, sparse=True).cuda()
    embedding(torch.arange(4).cuda()).sum().backward()
    with pytest.raises(UnsupportedError, match="SparseAdam needs to know which rows"):
        torch.optim.SparseAdam(embedding.parameters()).step()


@once
def test_lazy_modules_that_move_before_their_first_call(accelerator):
    accelerator("replicate=2")

    def script(device):
        body = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(8))
        model = nn.Sequential(body, nn.BatchNorm1d(8), nn.LazyLinear(3)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trace = []
        for _ in range(3):
            images, classes = torch.randn(6, 1, 6, 6).to(device), torch.randint(3, (6,)).to(device)
            loss = nn.functional.cross_entropy(model(images), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss)
        return trace, model.state_dict(), torch.rand(1)

    assert_same(*on_both(script))
