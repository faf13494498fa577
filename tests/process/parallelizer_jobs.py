"""What each process does in the parallelizer's tests."""

from __future__ import annotations

import contextlib
import copy
import io
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parallelizer_models import ADAMW, ROWS, make_batch, make_model
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from moreh_ap.parallelizer.apply import apply_plan
from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.forward import EagerForward
from moreh_ap.parallelizer.call.way_to_execute import way_to_execute
from moreh_ap.parallelizer.data.bucketed_allreduce import GradientSync, gradient_sync_of
from moreh_ap.parallelizer.data.fsdp import fsdp_modules, param_groups, set_requires_grad, settle
from moreh_ap.parallelizer.group_sums import host_sums
from moreh_ap.parallelizer.mesh import build_mesh
from moreh_ap.parallelizer.rng.policy import RandomPolicy
from moreh_ap.parallelizer.state.loading import TensorSource, fill, full_tensor, write_tensor
from moreh_ap.parallelizer.trial.split_check import check_split
from moreh_ap.parallelizer.trial.split_verdict import SplitVerdict
from moreh_ap.plan import Plan
from moreh_ap.protocol.batch import row_range, slice_rows

CPU = torch.device("cpu")


class Runner:
    """Calls a model under a plan as a worker would: split check first, then each batch in this worker's rows."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.plan = plan
        self.meta = copy.deepcopy(model).to("meta")
        self.model = model
        apply_plan(model, plan, build_mesh(plan, "cpu"))
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.verdict: SplitVerdict | None = None

    def call(self, batch: dict[str, Any], *, grad: bool = True, **extra: Any) -> Any:
        """Returns the forward of a global batch of named tensors."""
        leaves, spec = tree_flatten(batch)
        rows = leaves[0].shape[0]
        call = Call(self.model, "unsplit", CPU, grad=grad, random=RandomPolicy(seed=3), **extra)
        if self.verdict is None:
            self.verdict = check_split(call, (), batch, rows)
        if self.verdict.split and rows >= self.world:
            extra = {"kinds": self.verdict.kinds, "rules": self.verdict.rules, **extra}
            call = Call(self.model, "split", CPU, grad=grad, random=RandomPolicy(seed=3, worker=self.rank), **extra)
            batch = tree_unflatten(slice_rows(leaves, rows, *row_range(self.rank, self.world, rows)), spec)
        self.mode = call.mode
        return way_to_execute(call, self.plan, rows, self.meta)(call, (), batch)

    def value(self, forward: Any, leaf: int = 0) -> Tensor:
        """Returns what the leaf of the result is on one device."""
        part = forward.outputs[leaf]
        kind = self.verdict.kinds[leaf] if self.mode == "split" else "same"
        if kind == "share":
            part = part.clone()
            dist.all_reduce(part)
        elif kind == "rows":
            parts: list[Any] = [None] * self.world
            dist.all_gather_object(parts, part)
            part = torch.cat(parts)
        return part

    @staticmethod
    def loss_gradient(forward: Any, factor: float = 1.0) -> list[Tensor | None]:
        """Returns output gradients that start at the loss, which comes first in all results here."""
        return [torch.tensor(factor), *[None] * (forward.treespec.num_leaves - 1)]

    def weights(self) -> dict[str, Tensor]:
        """Returns all weights, whole."""
        settle(self.model)
        return {name: full_tensor(param) for name, param in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor | None]:
        """Returns all gradients, whole."""
        settle(self.model)
        return {
            name: None if param.grad is None else full_tensor(param.grad)
            for name, param in self.model.named_parameters()
        }


def train(rank: int, world: int, name: str, plan: str, steps: int, rows: int = ROWS) -> Any:
    """Returns mode, losses and final weights."""
    runner = Runner(make_model(name).train(), Plan.parse(plan))
    optimizer = torch.optim.AdamW(runner.model.parameters(), **ADAMW)
    losses = []
    for step in range(steps):
        forward = runner.call(make_batch(name, step, rows))
        early = runner.value(forward).item() if step % 3 == 0 else None  # read before backward now and then
        forward.backward(runner.loss_gradient(forward))
        losses.append(runner.value(forward).item())
        if early is not None and abs(early - losses[-1]) > 1e-6 * abs(early):
            raise AssertionError(f"step {step}: loss {early} before backward, {losses[-1]} after")
        optimizer.step()
        optimizer.zero_grad()
    assert runner.verdict is not None
    return runner.mode, runner.verdict.reason, losses, runner.weights() if rank == 0 else runner.weights() and None


def run_split_check(rank: int, world: int, model_class: type[nn.Module], plan: str, training: bool = True) -> Any:
    """Returns the split verdict, and what the check left: printed text, changed buffers, gradients, random state."""
    torch.manual_seed(0)
    model = model_class().train(training)
    apply_plan(model, Plan.parse(plan), build_mesh(Plan.parse(plan), "cpu"))
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    random_state = torch.get_rng_state()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        verdict = check_split(Call(model, "split", CPU), (), make_batch("classifier", 0), ROWS)
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, buffers[name])]
    with_grad = [name for name, param in model.named_parameters() if param.grad is not None]
    return verdict, printed.getvalue(), changed, with_grad, bool(torch.equal(random_state, torch.get_rng_state()))


def accumulate(rank: int, world: int, plan: str, order: str) -> Any:
    """Returns the gradients after three losses, in one of several orders of forwards and backwards."""
    runner = Runner(make_model("gpt2"), Plan.parse(plan))
    batches = [make_batch("gpt2", step) for step in range(3)]
    if order == "one by one":
        for factor, batch in enumerate(batches, 1):
            forward = runner.call(batch)
            forward.backward(runner.loss_gradient(forward, factor / 4))
    else:
        forwards = [runner.call(batch) for batch in batches]
        turns = [0, 1, 2] if order == "forwards first" else [2, 0, 1]
        for turn in turns:
            forwards[turn].backward(runner.loss_gradient(forwards[turn], (turn + 1) / 4))
    return runner.gradients()


def whole_gradients(rank: int, world: int, plan: str, name: str) -> Any:
    """Returns how a step with micro-batches goes about gradients, given the rows 4 x `world` of `skipping_batch`.

    Returns:
        The most bytes of whole gradients that were there at a time, those of all parameters and of the largest block,
        and the gradients of two such steps.
    """
    runner = Runner(make_model(name).train(), Plan.parse(plan))
    groups = [group for part in fsdp_modules(runner.model) for group in param_groups(part)]
    there = []

    def watched(post_backward: Any) -> Any:
        def run(*unused: Any) -> None:
            there.append(sum(map(_whole_gradient_bytes, groups)))
            post_backward(*unused)

        return run

    for group in groups:
        group.post_backward = watched(group.post_backward)
    for _ in range(2):
        rows = tree_map(lambda leaf: leaf[4 * rank : 4 * rank + 4], skipping_batch(4 * world))
        call = Call(runner.model, "split", CPU, random=RandomPolicy(seed=3), kinds=("share", "rows"))
        forward = way_to_execute(call, runner.plan, 4 * world, runner.meta)(call, (), rows)
        forward.backward([torch.tensor(1.0), None])
    sizes = [sum(param.numel() for param in part.parameters()) for part in make_model(name).blocks]
    whole = sum(param.numel() for param in make_model(name).parameters())
    return max(there), 4 * whole, 4 * max(sizes), runner.gradients()


def _whole_gradient_bytes(group: Any) -> int:
    """Returns the bytes of the gradients in a group of FSDP2 that are not reduced."""
    found = [param.unsharded_accumulated_grad for param in group.fsdp_params]
    found += [param._unsharded_param.grad for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    return sum(grad.nbytes for grad in found if grad is not None)


def skipping_batch(rows: int) -> dict[str, Tensor]:
    """Returns a batch of which two rows in four come to every block of `Skipping`, two to all but one."""
    batch = make_batch("skipping", 0, rows)
    batch["x"][:, 0] = torch.where(torch.arange(rows) % 4 < 2, -1.0, 1.0)
    return batch


def freeze(rank: int, world: int, plan: str) -> Any:
    """Returns gradients with some parameters frozen before the plan, some after it, and with those set free again."""
    model = make_model("llama")
    model.model.layers[0].requires_grad_(False)
    runner = Runner(model, Plan.parse(plan))
    gradients = []
    for flags in ({}, {"model.embed_tokens.weight": False, "model.layers.1.mlp.up_proj.weight": False},
                  {"model.embed_tokens.weight": True, "model.layers.0.mlp.up_proj.weight": True}):  # fmt: skip
        set_requires_grad(runner.model, flags)
        forward = runner.call(make_batch("llama", 0))
        forward.backward(runner.loss_gradient(forward))
        gradients.append(runner.gradients())
        for param in runner.model.parameters():
            param.grad = None
    return gradients


def from_logits(rank: int, world: int, plan: str) -> Any:
    """Returns logits, gradients of parameters and of a float input for a loss that the caller computes itself."""
    runner = Runner(make_model("classifier"), Plan.parse(plan))
    batch = make_batch("classifier", 0)
    batch["x"].requires_grad_(True)
    forward = runner.call(batch)
    weights = torch.sin(torch.arange(ROWS * 7.0)).reshape(ROWS, 7)
    logits = runner.value(forward, 1)
    start, stop = row_range(rank, world, ROWS) if runner.mode == "split" else (0, ROWS)
    (x_grad,) = forward.backward([None, weights[start:stop]])
    return runner.mode, logits, runner.gradients(), x_grad


def parts_of_a_model(rank: int, world: int, plan: str) -> Any:
    """Returns what a submodule and a method give when they are called alone, after a forward that raised."""
    runner = Runner(make_model("classifier"), Plan.parse(plan))
    batch = make_batch("classifier", 0)
    try:
        EagerForward(Call(runner.model, "unsplit", CPU), (batch["x"], batch["labels"][:3]), {})
    except ValueError as error:
        raised = str(error)
    features = EagerForward(Call(runner.model, "unsplit", CPU, target=runner.model.features), (batch["x"],), {})
    settle(runner.model)
    head = EagerForward(Call(runner.model, "unsplit", CPU, target=runner.model.inlet), (batch["x"],), {})
    head.backward([torch.ones_like(head.outputs[0])])
    return raised, features.outputs[0], head.outputs[0], runner.gradients()


def edit_weights(rank: int, world: int, plan: str) -> Any:
    """Returns the losses before and after weights were replaced, once in training and once without gradients."""
    runner = Runner(make_model("gpt2"), Plan.parse(plan))
    batch = make_batch("gpt2", 0)
    losses = [runner.value(runner.call(batch)).item(), runner.value(runner.call(batch, grad=False)).item()]
    settle(runner.model)
    for param in runner.model.parameters():
        write_tensor(param, full_tensor(param) * 1.5)
    losses += [runner.value(runner.call(batch)).item(), runner.value(runner.call(batch, grad=False)).item()]
    return losses


def some_workers_skip_a_parameter(rank: int, world: int) -> Any:
    """Returns gradients where each parameter was used on some workers, on all, or on none; twice, to accumulate."""
    model = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("all", "even", "none")})
    apply_plan(model, Plan(replicate=world), build_mesh(Plan(replicate=world), "cpu"))
    sync = gradient_sync_of(model)
    assert sync is not None
    for turn in range(2):
        kept = model["all"].weight.grad
        with sync.sync():
            loss = model["all"](torch.ones(2)).sum() * (rank + 1)
            if rank % 2 == 0 and turn == 0:
                loss = loss + model["even"](torch.ones(2)).sum()
            loss.backward()
        if turn == 1 and kept is not model["all"].weight.grad:
            raise AssertionError("accumulating gave the parameter another gradient object")
    held = model["all"].weight.grad
    value = held.clone()
    for param in model.parameters():
        param.grad = None
    with sync.sync():
        model["all"](torch.ones(2)).sum().backward()
    if not torch.equal(held, value):
        raise AssertionError("a gradient that somebody kept was overwritten")
    model["all"].weight.grad = held
    return {name: None if part.weight.grad is None else part.weight.grad.tolist() for name, part in model.items()}


def load(rank: int, world: int, plan: str, file: str, name: str, missing: str | None) -> Any:
    """Returns the loaded weights, which of them share a tensor, and how many rows were read."""
    model = make_model(name)
    with torch.device("meta"):
        empty = make_model(name)
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    apply_plan(empty, Plan.parse(plan), build_mesh(Plan.parse(plan), "cpu"))
    sources = {key: TensorSource(file, f"stored.{key}") for key in names if key != missing}
    fill(empty, sources, CPU)
    whole = {key: full_tensor(value) for key, value in [*empty.named_parameters(), *empty.named_buffers()]}
    tied = name == "gpt2" and empty.lm_head.weight is empty.transformer.wte.weight
    forward = EagerForward(Call(empty, "unsplit", CPU, grad=False), (), make_batch(name, 0))
    return whole, tied, forward.outputs[0].item()


def bf16(rank: int, world: int, plan: str) -> Any:
    """Returns dtypes of loss, logits and weights under bf16, and the losses of ten steps."""
    runner = Runner(make_model("llama"), Plan.parse(plan))
    optimizer = torch.optim.AdamW(runner.model.parameters(), **ADAMW)
    losses = []
    for _ in range(10):
        forward = runner.call(make_batch("llama", 0))
        forward.backward(runner.loss_gradient(forward))
        dtypes = {leaf.dtype for leaf in forward.outputs} | {p.grad.dtype for p in runner.model.parameters()}
        losses.append(runner.value(forward).item())
        optimizer.step()
        optimizer.zero_grad()
    return runner.mode, dtypes, losses


def held_logits(rank: int, world: int, plan: str) -> Any:
    """Returns, for loss and logits of a model under bf16, the dtype that is held and the one that is promised."""
    torch.manual_seed(0)
    runner = Runner(ManyLogits(), Plan.parse(plan))
    forward = runner.call({"ids": torch.arange(12).view(4, 3)})
    forward.backward(runner.loss_gradient(forward))
    held = [leaf.dtype for leaf in forward.outputs]
    return runner.mode, held, [leaf.dtype for leaf in forward.shapes]


class ManyLogits(nn.Module):
    """A language model with 2,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 2000)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embedding(ids).tanh())
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


def written_twice(rank: int, world: int) -> Any:
    """Returns the gradient of a layer that two re-entrant checkpoints run, so that backward writes to it twice."""
    layer = shared_layer()
    apply_plan(layer, Plan(replicate=world), build_mesh(Plan(replicate=world), "cpu"))
    sync = gradient_sync_of(layer)
    assert sync is not None
    with sync.sync():
        through_checkpoints(layer, rank).backward()
    return layer.weight.grad


def shared_layer() -> nn.Linear:
    """Returns the layer of `written_twice`."""
    torch.manual_seed(0)
    return nn.Linear(3, 3, bias=False)


def through_checkpoints(layer: nn.Linear, rank: int) -> Tensor:
    """Returns the loss of one worker in `written_twice`."""
    hidden = torch.full((2, 3), 1.0 + rank, requires_grad=True)
    for _ in range(2):
        hidden = checkpoint(layer, hidden, use_reentrant=True).tanh()
    return hidden.sum()


def sum_through_hosts(rank: int, world: int, per_host: int) -> Any:
    """Returns the gradients of two steps of small buckets on workers of several hosts, and what the ranks of other
    hosts were sent: elements of each tensor summed over a group.

    In the first step each worker leaves another layer out; the second begins with one that fails on all workers.
    """
    summed: list[tuple[int, int]] = []
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        summed.append((dist.get_world_size(kwargs["group"]), tensor.numel()))
        return all_reduce(tensor, *args, **kwargs)

    model = blocks_model()
    of_hosts = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(per_host))
    with of_hosts, mock.patch.object(dist, "all_reduce", counted):
        sync = GradientSync(model, None, host_sums(None, "cpu"), bucket_bytes=4000)
        for step in range(2):
            if step:
                with contextlib.suppress(ZeroDivisionError), sync.sync():
                    blocks_loss(model, rank, step).backward()
                    raise ZeroDivisionError
            with sync.sync():
                blocks_loss(model, rank, step).backward()
    return {name: param.grad for name, param in model.named_parameters()}, summed


def blocks_model() -> nn.Module:
    """Returns five layers of different sizes, of which the first is never used."""
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(width, 23) for width in (23, 29, 23, 41, 17)))


def blocks_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """Returns the loss of a worker's rows; in the first step it leaves a layer out that others use."""
    generator = torch.Generator().manual_seed(10 * rank + step)
    used = [layer for number, layer in enumerate(model) if number not in (0, 0 if step else rank + 1)]
    return sum(layer(torch.randn(3, layer.in_features, generator=generator)).square().mean() for layer in used)
