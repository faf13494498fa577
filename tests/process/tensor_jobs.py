"""What the processes of a team do in the tests of tensor parallelism: each compares itself with the plain model.

Every process also runs the plain model by itself, so nothing but verdicts has to travel.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from families import FAMILIES, VOCABULARY, Family
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moreh_ap.errors import MorehError
from moreh_ap.parallelizer.layout import TensorLayout
from moreh_ap.parallelizer.reduction import GlobalReduction
from moreh_ap.parallelizer.tensor import TensorParallel, apply_tensor_parallel
from moreh_ap.parallelizer.tensor_crossing import Crossing
from moreh_ap.parallelizer.tensor_split import SplitTensor

_NOISE = ("key.bias", "k_proj.bias", "c_attn.bias", "query_key_value.bias")
"""Biases of attention keys: their gradient is zero but for rounding, and AdamW would divide rounding by rounding."""


def _mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,))


def _own_part(whole: Tensor, layout: TensorLayout | None) -> Tensor:
    if layout is None:
        return whole
    part = whole.new_zeros(layout.local_shape)
    for there, here in layout.pieces():
        part[here] = whole[there]
    return part


def _difference(got: Tensor, wanted: Tensor, largest: Tensor) -> float:
    """Relative to the largest element, of which one below 1e-3 is taken for rounding of others."""
    return float((got - wanted).abs().max()) / max(float(largest.abs().max()), 1e-3)


def _compare_gradients(split: nn.Module, plain: nn.Module, applied: TensorParallel) -> float:
    """Returns the largest difference, by each gradient's largest element; infinite where only one has a gradient."""
    worst = 0.0
    params = dict(split.named_parameters())
    for name, param in plain.named_parameters():
        got, wanted = params[name].grad, param.grad
        if (got is None) != (wanted is None):
            return float("inf")
        if got is not None and wanted is not None:
            got = got.full_tensor() if isinstance(got, DTensor) else got
            worst = max(worst, _difference(got, _own_part(wanted, applied.layouts.get(name)), wanted))
    return worst


def _run(family: Family, model: nn.Module, step: int) -> Tensor:
    """The family's loss; logits that the model returns are gathered for a loss that the script computes."""
    return family.run(lambda *args, **kwargs: _gathered(model(*args, **kwargs)), family.batch(step))  # type: ignore[arg-type]


def _gathered(result: Any) -> Any:
    return result.full_tensor() if isinstance(result, DTensor) else result


def train(rank: int, world: int, name: str, sequence_parallel: bool) -> dict[str, Any]:
    """Three steps of AdamW of a family, split and plain."""
    family = FAMILIES[name]
    plain, split = family.build(), family.build()
    applied = apply_tensor_parallel(split, _mesh(world), sequence_parallel=sequence_parallel)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-6) for m in (plain, split)]
    losses, gradients = [], []
    for step in range(3):
        wanted, got = family.run(plain, family.batch(step)), _run(family, split, step)
        wanted.backward()
        got.backward()
        losses.append(abs(got.item() - wanted.item()) / abs(wanted.item()))
        gradients.append(_compare_gradients(split, plain, applied))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = 0.0
    params = dict(split.named_parameters())
    for key, param in plain.named_parameters():
        if not key.endswith(_NOISE):
            wanted = _own_part(param.detach(), applied.layouts.get(key))
            weights = max(weights, _difference(params[key].detach(), wanted, param.detach()))
    elements = sum(p.numel() for p in split.parameters()) / sum(p.numel() for p in plain.parameters())
    return {
        "losses": max(losses),
        "first_gradients": gradients[0],
        "gradients": max(gradients),
        "weights": weights,
        "elements": elements,
        "decisions": applied.decisions,
        "layouts": applied.layouts,
        "tied": len(list(split.parameters())) == len(list(plain.parameters())),
    }


class _LargeTensors(TorchDispatchMode):
    """Counts the plain floating-point tensors that operations make whose last dim is the whole vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        if type(result) is Tensor and result.is_floating_point() and VOCABULARY in result.shape:
            self.shapes.append(tuple(result.shape))
        return result


def shapes_of_training(rank: int, world: int, name: str, split: bool) -> tuple[int, list[tuple[int, ...]]]:
    """Forward and backward under the eye of `_LargeTensors`."""
    family = FAMILIES[name]
    model = family.build()
    if split:
        apply_tensor_parallel(model, _mesh(world))
    seen = _LargeTensors()
    with seen:
        loss = model(**family.batch(0)).loss
        loss.backward()
    return seen.operations, seen.shapes


def cross_entropies(rank: int, world: int) -> dict[str, float]:
    """Every form of the cross-entropy, value and gradient, against the plain one."""
    crossing = Crossing(_mesh(world))
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, VOCABULARY, generator=generator) * 3
    target = torch.randint(0, VOCABULARY, (6,), generator=generator)
    target[2] = -100
    weight = torch.rand(VOCABULARY, generator=generator) + 0.5
    probabilities = torch.softmax(torch.randn(6, VOCABULARY, generator=generator), -1)
    in_3d = (scores.view(2, 3, VOCABULARY).transpose(1, 2), target.view(2, 3))
    forms: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
        "mean": (scores, target, {}),
        "sum": (scores, target, {"reduction": "sum"}),
        "none": (scores, target, {"reduction": "none"}),
        "ignored": (scores, target.clamp(min=0), {"ignore_index": int(target[0])}),
        "weights": (scores, target.clamp(min=0), {"weight": weight}),
        "weights and ignored": (scores, target, {"weight": weight, "reduction": "sum"}),
        "smoothing": (scores, target, {"label_smoothing": 0.1}),
        "smoothing and weights": (scores, target, {"label_smoothing": 0.1, "weight": weight}),
        "probabilities": (scores, probabilities, {}),
        "classes in dim 1": (*in_3d, {}),
        "one row": (scores[0], target[0], {}),
        "large": (scores * 1e4, target, {}),
        "double": (scores.double(), target, {}),
    }
    found = {}
    for name, (given, wanted_target, options) in forms.items():
        plain = given.clone().requires_grad_()
        whole = given.clone().requires_grad_()
        dim = 1 if given.ndim > 1 else 0
        start, stop = crossing.part_of(given.shape[dim])
        split = SplitTensor.from_local(whole.narrow(dim, start, stop - start), given.shape[dim], dim, crossing)
        wanted = F.cross_entropy(plain, wanted_target, **options)
        got = F.cross_entropy(split, wanted_target, **options)
        factor = torch.arange(1, wanted.numel() + 1, dtype=wanted.dtype).view(wanted.shape)
        (wanted * factor).sum().backward()
        (got * factor).sum().backward()
        assert plain.grad is not None and whole.grad is not None
        part = plain.grad.narrow(dim, start, stop - start)
        error = _difference(whole.grad.narrow(dim, start, stop - start), part, plain.grad)
        found[name] = max(error, _difference(got.detach(), wanted.detach(), wanted.detach()))
    try:
        F.cross_entropy(split, torch.full((6,), VOCABULARY))
        found["a target out of bounds is refused"] = 1.0
    except IndexError:
        found["a target out of bounds is refused"] = 0.0
    return found


def _tied_twice(x: Tensor) -> Tensor:
    return x * x.sum(-1, keepdim=True)


OPERATIONS: dict[str, Any] = {
    "softcap": lambda x: 30 * torch.tanh(x / 30),
    "a mask": lambda x: x[torch.tensor([[True, False, True], [False, True, True]])],
    "gather": lambda x: x.gather(-1, torch.tensor([[[1], [2], [100]], [[3], [4], [5]]])),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "topk": lambda x: x.topk(3, -1).values,
    "split": lambda x: x.split(50, dim=-1)[1],
    "chunk of rows": lambda x: x.chunk(2, dim=0)[1],
    "some columns": lambda x: x[..., 3:60],
    "last position": lambda x: x[:, -1, :],
    "last position kept": lambda x: x[:, -1:],
    "shifted": lambda x: x[:, :-1].contiguous().view(-1, VOCABULARY),
    "flattened": lambda x: x[:, :-1].flatten(0, 1),
    "reshaped across": lambda x: x.reshape(2, -1),
    "with a plain tensor": lambda x: x + torch.arange(VOCABULARY),
    "with a column": lambda x: x * torch.tensor([[[2.0], [3.0], [4.0]]] * 2),
    "plain tensor first": lambda x: torch.arange(VOCABULARY) - x,
    "where": lambda x: torch.where(torch.arange(VOCABULARY) % 2 == 0, x, torch.tensor(-1e9)),
    "in place": lambda x: x.clone().mul_(2.0).add_(1.0),
    "filled": lambda x: x.clone().masked_fill_(torch.arange(VOCABULARY) == 7, 0.0),
    "transposed": lambda x: x.transpose(1, 2)[:, 5],
    "a matrix product": lambda x: x @ torch.eye(VOCABULARY)[:, :4],
    "a mean": lambda x: x.mean(),
    "einsum": lambda x: torch.einsum("btv,v->bt", x, torch.arange(float(VOCABULARY))),
    "used twice": _tied_twice,
    "double": lambda x: x.double() / 3,
    "a list": lambda x: torch.stack([x, x]),
}


def operations(rank: int, world: int) -> dict[str, float]:
    """What scripts and models do to logits: value and gradient."""
    crossing = Crossing(_mesh(world))
    values = torch.randn(2, 3, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 20
    start, stop = crossing.part_of(VOCABULARY)
    found = {}
    for name, operation in OPERATIONS.items():
        plain = values.clone().requires_grad_()
        part = values[..., start:stop].clone().requires_grad_()
        split = SplitTensor.from_local(part, VOCABULARY, -1, crossing)
        wanted, got = operation(plain), operation(split)
        got = got.full_tensor() if isinstance(got, SplitTensor) else got
        factor = torch.sin(torch.arange(wanted.numel(), dtype=wanted.dtype)).view(wanted.shape)
        (wanted * factor).sum().backward()
        (got * factor).sum().backward()
        assert plain.grad is not None and part.grad is not None
        error = _difference(part.grad, plain.grad[..., start:stop], plain.grad)
        found[name] = max(error, _difference(got.detach(), wanted.detach(), wanted.detach()))
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            found[name] = float("inf")
    return found


def dropout_masks(rank: int, world: int, sequence_parallel: bool, seed: int = 3) -> dict[str, Any]:
    """The masks that a GPT-2 with dropout draws, and the random number after them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=32, attn_implementation="eager")
    ).train()
    apply_tensor_parallel(model, _mesh(world), sequence_parallel=sequence_parallel)
    masks: dict[str, list[Tensor]] = {"hidden": [], "attention": []}
    plain = F.dropout

    def recorded(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        result = plain(input, p, training, inplace)
        masks["attention" if input.ndim == 4 else "hidden"].append(result.detach() != 0)
        return result

    torch.manual_seed(seed)
    F.dropout = recorded
    try:
        loss = model(**FAMILIES["gpt2"].batch(0)).loss
    finally:
        F.dropout = plain
    loss.backward()
    return {**masks, "loss": loss.item(), "next": torch.rand(4).tolist()}


def _recomputed(inner: Any, reentrant: bool, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(inner, **kwargs), *args, use_reentrant=reentrant)


def uses(rank: int, world: int, sequence_parallel: bool) -> dict[str, float]:
    """What scripts do beside one forward and one backward; each verdict is a difference to the plain model."""
    family = FAMILIES["qwen3"]
    found = {}

    def pair(frozen: tuple[str, ...] = ()) -> tuple[nn.Module, nn.Module, TensorParallel]:
        plain, split = family.build(), family.build()
        for model in (plain, split):
            for key, param in model.named_parameters():
                param.requires_grad_(not any(part in key for part in frozen))
        return plain, split, apply_tensor_parallel(split, _mesh(world), sequence_parallel=sequence_parallel)

    plain, split, applied = pair(frozen=("layers.1.", "embed_tokens", "q_norm"))
    for model in (plain, split):
        model(**family.batch(0)).loss.backward()
    found["frozen parameters"] = _compare_gradients(split, plain, applied)

    plain, split, applied = pair()
    for model in (plain, split):
        losses = [model(**family.batch(step)).loss for step in range(2)]
        losses[1].backward()
        (losses[0] / 4).backward(retain_graph=True)
        losses[0].backward()
    found["several forwards, graph retained"] = _compare_gradients(split, plain, applied)

    for reentrant in (False, True):
        plain, split, applied = pair()
        plain.config.use_cache = split.config.use_cache = False
        for block in split.model.layers:
            inner = block.forward
            block.forward = partial(_recomputed, inner, reentrant)
        for model in (plain, split):
            model(**family.batch(0)).loss.backward()
        found[f"recomputed blocks, reentrant={reentrant}"] = _compare_gradients(split, plain, applied)

    plain, split, applied = pair()
    batch = family.batch(0)
    for model in (plain, split):
        logits = _gathered(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
    found["a loss of the script's own"] = _compare_gradients(split, plain, applied)

    plain, split, applied = pair()
    plain.set_attn_implementation("eager")
    split.set_attn_implementation("eager")
    ids = batch["input_ids"]
    wanted, got = (m(input_ids=ids, output_hidden_states=True, output_attentions=True) for m in (plain, split))
    for name in ("hidden_states", "attentions"):
        pairs = zip(getattr(got, name), getattr(wanted, name), strict=True)
        found[name] = max(_difference(_gathered(g).detach(), w.detach(), w.detach()) for g, w in pairs)

    plain.eval()
    split.eval()
    with torch.no_grad():
        caches: list[Any] = [None, None]
        for position in range(4):
            results = []
            for index, model in enumerate((plain, split)):
                one = ids[:1, position : position + 1]
                result = model(input_ids=one, past_key_values=caches[index], use_cache=True)
                caches[index] = result.past_key_values
                results.append(_gathered(result.logits))
            found["one token after the other"] = _difference(results[1], results[0], results[0])
    ((start, stop),) = applied.cache_ranges  # type: ignore[misc]
    keys = [cache.layers[0].keys for cache in caches]
    found["caches"] = _difference(keys[1], keys[0][:, start:stop], keys[0])
    found["heads of caches"] = float(applied.cache_heads != keys[0].shape[1])
    return found


def with_data_axis(rank: int, world: int, name: str) -> float:
    """Two data-parallel ranks, sharded by FSDP2, of two tensor-parallel ones; the loss is a mean over all rows."""
    family = FAMILIES[name]
    plain, split = family.build(), family.build()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tensor"))
    applied = apply_tensor_parallel(split, mesh["tensor"])
    for block in split.model.layers:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(split, mesh=mesh["shard"])
    for module in (split, *split.model.layers):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    batch = family.batch(0)
    wanted = plain(**batch).loss
    wanted.backward()
    data = mesh["shard"]
    mine = {key: value.chunk(2)[data.get_local_rank()] for key, value in batch.items()}
    with GlobalReduction(torch.device("cpu"), group=data.get_group()):
        got = split(**mine).loss
    got.backward()
    total = got.detach().clone()
    dist.all_reduce(total, group=data.get_group())
    return max(_compare_gradients(split, plain, applied), _difference(total, wanted.detach(), wanted.detach()))


def on_meta(rank: int, world: int, name: str) -> dict[str, bool]:
    """A model split on meta has the parameters of one split with values."""
    with_values = FAMILIES[name].build()
    with torch.device("meta"):
        model = FAMILIES[name].make()
    layouts = apply_tensor_parallel(model, _mesh(world)).layouts
    expected = apply_tensor_parallel(with_values, _mesh(world)).layouts
    shapes = {key: tuple(p.shape) for key, p in model.named_parameters()}
    return {
        "layouts": layouts == expected,
        "shapes": shapes == {key: tuple(p.shape) for key, p in with_values.named_parameters()},
        "on meta": all(p.is_meta for p in model.parameters()),
    }


def refusal(rank: int, world: int, name: str, sequence_parallel: bool = False, **config: int) -> str:
    """The text of the error that a family is refused with."""
    model = FAMILIES[name].build()
    if config:
        model = type(model)(type(model.config)(**{**model.config.to_dict(), **config}))
    try:
        apply_tensor_parallel(model, _mesh(world), sequence_parallel=sequence_parallel)
    except MorehError as error:
        return str(error)
    return ""


class OddAttention(nn.Module):
    """Attention whose heads look at each other, with names as if they did not."""

    def __init__(self, hidden: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, hidden // heads
        self.q_proj, self.k_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.v_proj, self.o_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.num_heads, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.softmax(q @ k.transpose(-1, -2) / self.head_dim**0.5, -1)
        mixed = scores - scores.mean(1, keepdim=True)
        return self.o_proj((mixed @ v).transpose(1, 2).flatten(2))


class OddFeedForward(nn.Module):
    """A feed-forward that normalises its inner features, with names as if it did not."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.softmax(self.up_proj(x), -1))


class DirectFeedForward(nn.Module):
    """A feed-forward that reads its weight besides calling the layer."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.second(x)), self.first.weight) * self.first.weight.norm()


class OddModel(nn.Module):
    """Blocks that look as if they could be split by heads and features."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (OddAttention, OddFeedForward, DirectFeedForward)
        self.blocks = nn.ModuleList(nn.ModuleList(kind() for kind in kinds) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for part in block:
                x = x + part(x)
        return x


def odd_model(rank: int, world: int) -> dict[str, Any]:
    """A model on which every guess is wrong."""
    torch.manual_seed(0)
    plain = OddModel()
    split = copy.deepcopy(plain)
    applied = apply_tensor_parallel(split, _mesh(world))
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    for model in (plain, split):
        model(x).square().mean().backward()
    return {"difference": _compare_gradients(split, plain, applied), "decisions": applied.decisions}
