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
from families import FAMILIES, VOCABULARY
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from moreh_ap.errors import MorehError
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.state.tensor_layout import TensorLayout
from moreh_ap.parallelizer.tensor.split_tensor import gather_split_tensors
from moreh_ap.parallelizer.tensor.tensor_parallel import TensorParallel, apply_tensor_parallel

_NOISE = ("key.bias", "k_proj.bias", "c_attn.bias", "query_key_value.bias")
"""Biases of attention keys: their gradient is zero but for rounding, and AdamW would divide rounding by rounding."""


def tensor_mesh(world: int) -> DeviceMesh:
    """The tensor axis alone."""
    return init_device_mesh("cpu", (world,))


def _own_part(complete: Tensor, layout: TensorLayout | None) -> Tensor:
    if layout is None:
        return complete
    shard = complete.new_zeros(layout.local_shape)
    for there, here in layout.pieces():
        shard[here] = complete[there]
    return shard


def difference(got: Tensor, wanted: Tensor, largest: Tensor) -> float:
    """Relative to the largest element, of which one below 1e-3 is taken for rounding of others."""
    return float((got - wanted).abs().max()) / max(float(largest.abs().max()), 1e-3)


def compare_gradients(split: nn.Module, plain: nn.Module, applied: TensorParallel) -> float:
    """Returns the largest difference, by each gradient's largest element; infinite where only one has a gradient."""
    worst = 0.0
    params = dict(split.named_parameters())
    for name, param in plain.named_parameters():
        got, wanted = params[name].grad, param.grad
        if (got is None) != (wanted is None):
            return float("inf")
        if got is not None and wanted is not None:
            got = got.full_tensor() if isinstance(got, DTensor) else got
            worst = max(worst, difference(got, _own_part(wanted, applied.layouts.get(name)), wanted))
    return worst


def train(rank: int, world: int, name: str, sequence_parallel: bool) -> dict[str, Any]:
    """Three steps of AdamW of a family, split and plain."""
    family = FAMILIES[name]
    plain, split = family.build(), family.build()
    applied = apply_tensor_parallel(split, tensor_mesh(world), sequence_parallel=sequence_parallel)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-6) for m in (plain, split)]
    losses, gradients = [], []
    for step in range(3):
        wanted, got = family.run(plain, family.batch(step)), family.run(split, family.batch(step))
        wanted.backward()
        got.backward()
        losses.append(abs(got.item() - wanted.item()) / abs(wanted.item()))
        gradients.append(compare_gradients(split, plain, applied))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = 0.0
    params = dict(split.named_parameters())
    for key, param in plain.named_parameters():
        if not key.endswith(_NOISE):
            wanted = _own_part(param.detach(), applied.layouts.get(key))
            weights = max(weights, difference(params[key].detach(), wanted, param.detach()))
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


def dropout_masks(rank: int, world: int, sequence_parallel: bool, seed: int = 3) -> dict[str, Any]:
    """The masks that a GPT-2 with dropout draws, and the random number after them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=32, attn_implementation="eager")
    ).train()
    apply_tensor_parallel(model, tensor_mesh(world), sequence_parallel=sequence_parallel)
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
                param.requires_grad_(not any(name in key for name in frozen))
        return plain, split, apply_tensor_parallel(split, tensor_mesh(world), sequence_parallel=sequence_parallel)

    plain, split, applied = pair(frozen=("layers.1.", "embed_tokens", "q_norm"))
    for model in (plain, split):
        model(**family.batch(0)).loss.backward()
    found["frozen parameters"] = compare_gradients(split, plain, applied)

    plain, split, applied = pair()
    for model in (plain, split):
        losses = [model(**family.batch(step)).loss for step in range(2)]
        losses[1].backward()
        (losses[0] / 4).backward(retain_graph=True)
        losses[0].backward()
    found["several forwards, graph retained"] = compare_gradients(split, plain, applied)

    for reentrant in (False, True):
        plain, split, applied = pair()
        plain.config.use_cache = split.config.use_cache = False
        for block in split.model.layers:
            inner = block.forward
            block.forward = partial(_recomputed, inner, reentrant)
        for model in (plain, split):
            model(**family.batch(0)).loss.backward()
        found[f"recomputed blocks, reentrant={reentrant}"] = compare_gradients(split, plain, applied)

    plain, split, applied = pair()
    batch = family.batch(0)
    for model in (plain, split):
        logits = gather_split_tensors(
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        )
        F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
    found["a loss of the script's own"] = compare_gradients(split, plain, applied)

    plain, split, applied = pair()
    plain.set_attn_implementation("eager")
    split.set_attn_implementation("eager")
    ids = batch["input_ids"]
    wanted, got = (m(input_ids=ids, output_hidden_states=True, output_attentions=True) for m in (plain, split))
    for name in ("hidden_states", "attentions"):
        pairs = zip(getattr(got, name), getattr(wanted, name), strict=True)
        found[name] = max(difference(gather_split_tensors(g).detach(), w.detach(), w.detach()) for g, w in pairs)

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
                results.append(gather_split_tensors(result.logits))
            found["one token after the other"] = difference(results[1], results[0], results[0])
    ((start, stop),) = applied.cache_ranges  # type: ignore[misc]
    keys = [cache.layers[0].keys for cache in caches]
    found["caches"] = difference(keys[1], keys[0][:, start:stop], keys[0])
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
    axis = Axis(data.get_local_rank(), data.size(), data.get_group())
    with GlobalReduction(torch.device("cpu"), axis=axis):
        got = split(**mine).loss
    got.backward()
    total = got.detach().clone()
    dist.all_reduce(total, group=data.get_group())
    return max(compare_gradients(split, plain, applied), difference(total, wanted.detach(), wanted.detach()))


def on_meta(rank: int, world: int, name: str) -> dict[str, bool]:
    """A model split on meta has the parameters of one split with values."""
    with_values = FAMILIES[name].build()
    with torch.device("meta"):
        model = FAMILIES[name].make()
    layouts = apply_tensor_parallel(model, tensor_mesh(world)).layouts
    expected = apply_tensor_parallel(with_values, tensor_mesh(world)).layouts
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
        apply_tensor_parallel(model, tensor_mesh(world), sequence_parallel=sequence_parallel)
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
            for layer in block:
                x = x + layer(x)
        return x


def odd_model(rank: int, world: int) -> dict[str, Any]:
    """A model on which every guess is wrong."""
    torch.manual_seed(0)
    plain = OddModel()
    split = copy.deepcopy(plain)
    applied = apply_tensor_parallel(split, tensor_mesh(world))
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    for model in (plain, split):
        model(x).square().mean().backward()
    return {"difference": compare_gradients(split, plain, applied), "decisions": applied.decisions}
