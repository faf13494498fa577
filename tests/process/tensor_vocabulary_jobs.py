"""What the processes of a team do in the tests of a split vocabulary: logits, their losses, embeddings."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from families import FAMILIES, VOCABULARY
from tensor_jobs import compare_gradients, difference, tensor_mesh
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moreh_ap.parallelizer.tensor.crossing import Crossing
from moreh_ap.parallelizer.tensor.split_tensor import SplitTensor
from moreh_ap.parallelizer.tensor.tensor_parallel import apply_tensor_parallel


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
        apply_tensor_parallel(model, tensor_mesh(world))
    seen = _LargeTensors()
    with seen:
        loss = model(**family.batch(0)).loss
        loss.backward()
    return seen.operations, seen.shapes


def cross_entropies(rank: int, world: int) -> dict[str, float]:
    """Every form of the cross-entropy, value and gradient, against the plain one."""
    crossing = Crossing(tensor_mesh(world))
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
        start, stop = crossing.shard_range(given.shape[dim])
        split = SplitTensor.from_local(whole.narrow(dim, start, stop - start), given.shape[dim], dim, crossing)
        wanted = F.cross_entropy(plain, wanted_target, **options)
        got = F.cross_entropy(split, wanted_target, **options)
        factor = torch.arange(1, wanted.numel() + 1, dtype=wanted.dtype).view(wanted.shape)
        (wanted * factor).sum().backward()
        (got * factor).sum().backward()
        assert plain.grad is not None and whole.grad is not None
        part = plain.grad.narrow(dim, start, stop - start)
        error = difference(whole.grad.narrow(dim, start, stop - start), part, plain.grad)
        found[name] = max(error, difference(got.detach(), wanted.detach(), wanted.detach()))
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
    "rows put together": lambda x: torch.cat([x, 2 * x]),
    "with plain rows": lambda x: torch.cat([x, torch.ones(2, 1, VOCABULARY)], dim=1),
    "columns put together": lambda x: torch.cat([x, x], dim=-1),
    "a list": lambda x: torch.stack([x, x]),
}


def operations(rank: int, world: int) -> dict[str, float]:
    """What scripts and models do to logits: value and gradient."""
    crossing = Crossing(tensor_mesh(world))
    values = torch.randn(2, 3, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 20
    start, stop = crossing.shard_range(VOCABULARY)
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
        error = difference(part.grad, plain.grad[..., start:stop], plain.grad)
        found[name] = max(error, difference(got.detach(), wanted.detach(), wanted.detach()))
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            found[name] = float("inf")
    return found


class Padded(nn.Module):
    """An embedding with a padding row, tied to nothing, and a head."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=padding)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(ids)), ids)


def padding_rows(rank: int, world: int) -> list[float]:
    """For padding in each rank's rows: the row gets no gradient, the other rows theirs."""
    found = []
    for padding in (0, 3, VOCABULARY - 1):
        torch.manual_seed(0)
        plain = Padded(padding)
        split = copy.deepcopy(plain)
        applied = apply_tensor_parallel(split, tensor_mesh(world))
        for model in (plain, split):
            model(torch.tensor([padding, 1, 2, 60, 100, padding])).backward()
        assert "embedding.weight" in applied.layouts
        found.append(compare_gradients(split, plain, applied))
    return found
