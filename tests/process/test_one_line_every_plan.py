"""What scripts do beside plain steps, under tensor, pipeline and combined plans: exact against the code on the CPU."""

from __future__ import annotations

import pytest
import torch
from one_line_models import OwnTransformer, ragged_batches, tiny_gpt2, tiny_llama
from pipeline_jobs import train_tied
from torch import nn
from torch.nn.utils import prune
from transformers import RobertaConfig, RobertaForMaskedLM

from moreh_ap.device import disable
from moreh_ap.errors import PlanError, UnsupportedError

pytestmark = pytest.mark.rotating  # the same under one more plan each

PLANS = [
    "tensor=2",
    "pipeline=2",
    "shard=2,tensor=2",
    "tensor=2,sequence_parallel=true,pipeline=2",
    "shard=2,pipeline=2,schedule=zero_bubble,recompute=selective",
]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""A product summed in parts rounds differently; one that is wrong is off by far more."""


@pytest.fixture(params=PLANS)
def plan(request, accelerator):
    accelerator(request.param)
    return request.param


def on_both(script):
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        results.append(script(device))
    return results


def assert_same(expected, got):
    torch.testing.assert_close(got, expected, **TOLERANCE)


def batch(step, device, rows=6):
    return {name: value.to(device) for name, value in ragged_batches(step + 1, rows)[step].items()}


def on_host(model):
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def gradients(model):
    return {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_loss_read_before_its_backward(plan):
    def script(device):
        model = tiny_llama().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        read = []
        for step in range(3):
            loss = model(**batch(step, device)).loss
            read.append(loss.item())
            (loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.tensor(read), on_host(model)

    assert_same(*on_both(script))


def test_a_loss_from_logits_and_a_batch_of_one_row(plan):
    def script(device):
        model = tiny_gpt2().to(device)
        given = batch(0, device, rows=5)
        labels = given.pop("labels")
        logits = model(**given).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        single = model(**batch(1, device, rows=1)).loss
        single.backward()
        return loss.detach().cpu(), single.detach().cpu(), gradients(model)

    assert_same(*on_both(script))


@pytest.mark.parametrize("text", ["pipeline=2", "shard=2,pipeline=2,micro_batches=2"])
def test_a_head_with_the_weight_of_the_embedding_and_a_bias_of_its_own(text, accelerator):
    """Its weight is on both stages, its bias on the last alone; an evaluation runs all stages on each worker."""
    accelerator(text)
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_attention_heads": 4}

    def script(device):
        config = RobertaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, max_position_embeddings=32,
            **settings,
        )  # fmt: skip
        model = RobertaForMaskedLM(config).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            loss = model(**batch(step, device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses += [loss.cpu(), model(**batch(step + 3, device)).loss.cpu()]
        return losses, on_host(model)

    assert_same(*on_both(script))


def test_accumulation_clipping_and_frozen_parameters(plan):
    def script(device):
        model = tiny_gpt2().to(device)
        for parameter in model.transformer.h[0].parameters():
            parameter.requires_grad_(False)
        model.transformer.wte.weight.requires_grad_(False)  # tied: on two stages of a pipeline
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        norms = []
        for step in range(4):
            (model(**batch(step, device, rows=5)).loss / 2).backward()
            if step % 2:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).cpu())
                optimizer.step()
                optimizer.zero_grad()
        return norms, on_host(model)

    assert_same(*on_both(script))


def test_gradients_that_do_not_accumulate(plan):
    def script(device):
        model = tiny_llama().to(device)
        model(**batch(0, device)).loss.backward()
        found = torch.autograd.grad(model(**batch(1, device)).loss, list(model.parameters()))
        return [gradient.cpu() for gradient in found], gradients(model)

    expected, got = on_both(script)
    assert_same(expected, got)


def test_weights_and_gradients_edited_in_place(plan):
    def script(device):
        model = tiny_gpt2().to(device)
        model(**batch(0, device)).loss.backward()
        first, last = model.transformer.h[0].attn.c_attn.weight, model.transformer.h[-1].attn.c_attn.weight
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
            first.add_(last)  # of two stages of a pipeline
            last.copy_(torch.full(tuple(last.shape), 0.01).to(device))
        total = sum(parameter.grad.norm() ** 2 for parameter in model.parameters())
        loss = model(**batch(1, device)).loss
        return total.cpu(), loss.detach().cpu(), {name: value.cpu() for name, value in model.state_dict().items()}

    assert_same(*on_both(script))


def test_evaluation_and_generation(plan):
    def script(device):
        model = tiny_llama().to(device).eval()
        given = batch(0, device)
        with torch.no_grad():
            result = model(**given, output_hidden_states=True, use_cache=True)
            embedded = model.model.embed_tokens(given["input_ids"])
        prompt = given["input_ids"][:, :4]
        greedy = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
        beams = model.generate(prompt[:2], max_new_tokens=4, num_beams=3, do_sample=False, pad_token_id=0)
        caches = [part.cpu() for layer in result.past_key_values.layers for part in (layer.keys, layer.values)]
        hidden = [state.cpu() for state in result.hidden_states]
        return result.loss.cpu(), hidden, caches, embedded.cpu(), greedy.cpu(), beams.cpu()

    assert_same(*on_both(script))


def test_a_model_of_one_s_own_whose_residuals_are_outside_of_its_blocks(plan):
    if "zero_bubble" in plan:  # PyTorch's split of a backward does not take a graph of this shape
        with pytest.raises(PlanError, match="failed for OwnTransformer"):
            OwnTransformer().to("cuda")(*(value.to("cuda") for value in list(batch(0, "cpu").values())[:1]))
        disable()  # one stage has failed and the other waits for it: workers for the tests that follow
        return

    def script(device):
        model = OwnTransformer().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
        losses = []
        for step in range(3):
            given = batch(step, device)
            loss = model(given["input_ids"], given["labels"])[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        return losses, on_host(model)

    assert_same(*on_both(script))


class PickyBackward(torch.autograd.Function):
    """Returns its input; has no gradient of few rows."""

    @staticmethod
    def forward(ctx, h, fewest):
        ctx.fewest = fewest
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(gradient) < ctx.fewest:
            raise ValueError("too few rows")
        return gradient, None


class PickyBlock(nn.Module):
    def __init__(self, fewest, way):
        super().__init__()
        self.linear, self.fewest, self.way = nn.Linear(8, 8), fewest, way

    def forward(self, h):
        if self.way == "forward" and len(h) < self.fewest:
            raise ValueError("too few rows")
        return self.linear(PickyBackward.apply(h, self.fewest) if self.way == "backward" else h).tanh()


class PickyModel(nn.Module):
    """Raises an error for a single row on one way of one of its blocks: on one stage of a pipeline alone."""

    def __init__(self, picky, way):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(PickyBlock(2 if number == picky else 1, way) for number in range(4))

    def forward(self, x, y):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return nn.functional.mse_loss(self.head(h), y)


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("picky", [0, 3])
def test_rows_that_one_stage_alone_cannot_run_keep_no_other_waiting(accelerator, picky, way):
    accelerator("pipeline=2,micro_batches=2")
    inputs, targets = torch.randn(8, 4), torch.randn(8, 1)

    def script(device):
        model = PickyModel(picky, way).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(inputs.to(device), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach().cpu(), on_host(model)

    assert_same(*on_both(script))


def test_the_same_plan_and_seed_give_the_same_bits_and_another_seed_other_masks(plan):
    def losses(seed):
        torch.manual_seed(0)
        model = tiny_gpt2(dropout=0.2).to("cuda")
        torch.manual_seed(seed)
        found = []
        for step in range(2):
            loss = model(**batch(step, "cuda")).loss
            loss.backward()
            found.append(loss.item())
        return found

    assert losses(5) == losses(5) != losses(6)


class PenalisedModel(PickyModel):
    """Adds a penalty on the weights of its first block to the loss, which the last stage computes."""

    def forward(self, x, y):
        return super().forward(x, y) + sum(one.square().mean() for one in self.blocks[0].parameters())


def test_a_penalty_on_the_weights_of_another_stage_is_that_of_one_device(accelerator):
    accelerator("pipeline=2")
    inputs, targets = torch.randn(8, 4), torch.randn(8, 1)

    def script(device):
        model = PenalisedModel(0, "").to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(model(inputs.to(device), targets.to(device)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.item() for loss in losses], on_host(model)

    assert_same(*on_both(script))


class WanderingModel(PickyModel):
    """Goes to its blocks as its caller says."""

    def forward(self, x, y, way):
        h = self.embed(x)
        for block in self.blocks:
            h = h + (block.forward(h) if way == "forward" else block(h))
        if way == "penalty":
            h = h + self.blocks[0].linear.weight.square().mean()
        return nn.functional.mse_loss(self.head(h), y)


def test_a_head_whose_weight_a_hook_computes_is_evaluated_by_every_stage(accelerator):
    """Pruning computes it before the forward, from a parameter that one stage has and a mask that all have."""
    accelerator("pipeline=2")

    def script(device):
        model, trace = PickyModel(0, ""), []
        prune.l1_unstructured(model.head, "weight", 3)
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            x, y = torch.randn(4, 4).to(device), torch.randn(4, 1).to(device)
            with torch.no_grad():
                trace.append(model(x, y).cpu())
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return trace, on_host(model)

    with pytest.warns(UserWarning, match="sets head.weight in the workers"):
        assert_same(*on_both(script))


@pytest.mark.parametrize(("way", "why"), [("forward", "a part of a block"), ("penalty", "is used where that did not")])
def test_a_later_call_that_goes_another_way_through_the_stages_is_refused(accelerator, way, why):
    accelerator("pipeline=2")
    model, x, y = WanderingModel(0, "").to("cuda"), torch.randn(4, 4, device="cuda"), torch.randn(4, 1, device="cuda")
    model(x, y, "").backward()
    with pytest.raises(UnsupportedError, match=why):
        model(x, y, way)
    assert model(x, y, "").item() > 0  # and the accelerator goes on


@pytest.mark.parametrize(("world", "text"), [(2, "pipeline=2"), (4, "shard=2,pipeline=2")])
def test_both_copies_of_tied_weights_are_bit_equal_after_100_steps(team, world, text):
    found = team.run(world, train_tied, plan=text, steps=100)
    shards = world // 2
    for first, last in zip(found[:shards], found[shards:], strict=True):
        assert first["tied"] == last["tied"] != first["start"]


def test_what_a_pipeline_cannot_do_is_refused_with_a_reason(accelerator):
    accelerator("pipeline=2")
    with pytest.raises(PlanError, match="needs one list of equal blocks"):
        nn.Linear(4, 4).to("cuda")(torch.zeros(4, 4, device="cuda"))
    model = tiny_gpt2().to("cuda")
    model(**batch(0, "cuda"))
    with pytest.raises(UnsupportedError, match="trains the model as a whole"):
        model.transformer(batch(0, "cuda")["input_ids"])
    with pytest.raises(UnsupportedError, match="earlier stages"):
        model(**batch(0, "cuda"), output_hidden_states=True)
    assert model(**batch(0, "cuda")).loss.item() > 0  # and the accelerator goes on


class Score(nn.Linear):
    """Returns a view."""

    def forward(self, x_BF):
        return super().forward(x_BF).squeeze(-1)


def test_a_model_that_returns_a_view_is_no_reason_for_a_warning_of_fsdp2(accelerator, capfd):
    def script(device):
        model = Score(4, 1).to(device)
        model(torch.ones(4, 4, device=device)).square().mean().backward()
        return gradients(model)

    accelerator("shard=2")
    assert_same(*on_both(script))
    assert "Warning" not in "".join(capfd.readouterr())
