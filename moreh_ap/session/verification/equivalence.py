"""Whether a plan gives the numbers of one process: the same few steps trained on both, and compared.

Decides what is trained, what is compared and what counts as equal. Must not know the source of the model, nor the
caller: the command line, the first use of a model, or a test.

[Note: what a comparison rests on]
AdamW does not notice a gradient that is scaled as a whole, so weights alone would show little: the gradients of the
first step, and the norm of every step, are compared too. The bias of an attention key has a gradient that is zero but
for rounding. Relative to itself it is all noise, and AdamW walks along that noise where its eps is small: hence
`SMALLEST_GRADIENT` and `EPSILON`. With a learning rate of 1e-3 rounding alone moved a weight by half the limit (Llama,
64 positions, float32 against float64 in one process); with 3e-4 a step that is left out moves one by nine times it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.protocol.pytree import flatten
from moreh_ap.protocol.rng_state import host_untouched, state_of_host, state_of_stream

STEPS = 5
LEARNING_RATE, EPSILON, MAX_NORM = 3e-4, 1e-6, 1.0
LOSS_LIMIT, GRADIENT_LIMIT, WEIGHT_LIMIT = 1e-5, 1e-4, 1e-4
BF16_LOSS_LIMIT = 0.02
SMALLEST_GRADIENT = 1e-3
"""Gradients are compared relative to their tensor's largest element, or to this fraction of the model's if larger."""
NORM_ROUNDING = 2e-10
"""How far a norm may be off for each element of the largest tensor.

PyTorch's own norm is not better on the CPU: of 1e7 random float32 numbers it was off by 3.5e-4, of 4e7 by 2.8e-3
(torch 2.13, against float64). The norms of shards are less affected, so a plan differs from one process by as much.
"""
_SMALLEST_WEIGHT = 1e-12


@dataclass(frozen=True)
class Subject:
    """A model and the arguments of its calls.

    Attributes:
        module: On the CPU, in float32. It is copied before it is trained.
        calls: Positional and keyword arguments of a call, tensors on the CPU; step after step, then again from the
            first.
        path: The submodule that is called; empty for the module itself.
    """

    module: nn.Module
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    path: str = ""


@dataclass(frozen=True)
class Training:
    """The results of `STEPS` steps, on the CPU.

    Attributes:
        losses: Of every step.
        norms: Of the gradients of every step, before clipping.
        gradients: Of step 1, before clipping, by name.
        weights: The state dict after the last step; buffers too.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Equivalence:
    """How far a plan is from one process, each number the worst of its kind and relative.

    Attributes:
        plan: The plan as it is written.
        verdict: `verified`, `wrong` (some number is too far off), `refused` (no such plan for this model) or `failed`
            (an exception).
        reason: Why it is not verified; empty if it is.
        loss: Over the steps.
        norm: Of the gradient norm, over the steps.
        gradient: Of step 1, relative to a tensor's largest element, see `SMALLEST_GRADIENT`.
        gradient_name: The parameter with that difference.
        weight: After the last step, relative to a tensor's largest element.
        weight_name: The parameter or buffer with that difference.
    """

    plan: str
    verdict: str
    reason: str = ""
    loss: float = float("nan")
    norm: float = float("nan")
    gradient: float = float("nan")
    gradient_name: str = ""
    weight: float = float("nan")
    weight_name: str = ""

    @property
    def is_verified(self) -> bool:
        """Whether the plan may be trusted with this model."""
        return self.verdict == "verified"

    def row(self) -> tuple[str, ...]:
        """Returns plan, verdict, loss, gradient norm, gradient and name, weight and name, as texts for a table."""
        numbers = [
            "" if number != number else f"{number:.1e}" for number in (self.loss, self.norm, self.gradient, self.weight)
        ]
        loss, norm, gradient, weight = numbers
        return (self.plan, self.verdict, loss, norm, gradient, self.gradient_name, weight, self.weight_name)

    def __str__(self) -> str:
        if self.loss != self.loss:
            return f"{self.plan}: {self.verdict}: {self.reason}"
        plan, verdict, loss, norm, gradient, gradient_name, weight, weight_name = self.row()
        numbers = (
            f"loss {loss}, gradient norm {norm}, gradients {gradient} ({gradient_name}), "
            f"weights {weight} ({weight_name})"
        )
        return f"{plan}: {verdict}: {numbers}" + (f": {self.reason}" if self.reason else "")


@contextlib.contextmanager
def as_a_fresh_process() -> Iterator[None]:
    """Inside, PyTorch has the settings of a fresh process; afterwards the script's settings and streams."""
    dtype = torch.get_default_dtype()
    with (
        torch.random.fork_rng(devices=[]),
        host_untouched(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def train(subject: Subject, device: str) -> Training:
    """Trains a copy of the subject's module as a script does: forward, backward, clip, step.

    Args:
        device: "cpu", or "cuda" while an accelerator is enabled.
    """
    module = copy.deepcopy(subject.module).to(device)
    try:
        return _train(module, module.get_submodule(subject.path), subject, device)
    except PlanError:
        _leave(module)  # the model was not built
        raise


def _train(module: nn.Module, called: nn.Module, subject: Subject, device: str) -> Training:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:  # a model that only answers, with frozen weights: all of them are compared
        trained = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
        for parameter in trained:
            parameter.requires_grad_()
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, eps=EPSILON)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        call = subject.calls[step % len(subject.calls)]
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), call)
        loss = loss_of(called(*args, **kwargs))
        loss.backward()
        if step == 0:
            named = module.named_parameters()
            gradients = {name: p.grad.detach().cpu().clone() for name, p in named if p.grad is not None}
        norms.append(torch.nn.utils.clip_grad_norm_(trained, MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses_read, norms_read = [loss.item() for loss in losses], [norm.item() for norm in norms]
    weights = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
    _leave(module)
    return Training(losses_read, norms_read, gradients, weights)


def _leave(module: nn.Module) -> None:
    """Moves a module to the CPU, so that the workers free it. This replaces buffers, so they are read first."""
    for buffer in module.buffers():
        if isinstance(buffer, VirtualTensor):
            buffer._cell.read_here()
    module.to("cpu")


def loss_of(result: Any) -> Tensor:
    """Returns the loss among the results of a call, or without one the mean of the squares of its results.

    The loss is the attribute or entry of that name, or the first number that depends on parameters.

    Raises:
        PlanError: No result of the call depends on parameters.
    """
    named = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(named, Tensor) and named.dim() == 0:
        return named
    leaves = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise PlanError("the call gives no tensor that depends on the model's parameters", "a call that trains")
    for leaf in leaves:
        if leaf.dim() == 0:
            return leaf
    return torch.stack([leaf.float().pow(2).mean() for leaf in leaves]).sum()


def reference(subject: Subject) -> Training:
    """Returns the training of the subject in this process; the script's random streams are not changed.

    Dropout would draw other numbers under every plan. A module that still draws random numbers is switched to
    evaluation.

    Raises:
        PlanError: It draws random numbers even then, a loss is no number, or there is no gradient.
        Exception: The module raised it.
    """
    with as_a_fresh_process():
        before = state_of_stream(), state_of_host()
        training = train(subject, "cpu")
        if before != (state_of_stream(), state_of_host()):
            subject.module.eval()
            before = state_of_stream(), state_of_host()
            training = train(subject, "cpu")
            if before != (state_of_stream(), state_of_host()):
                raise PlanError("the forward draws random numbers, also in evaluation", "a deterministic forward")
    if not all(map(isfinite, [*training.losses, *training.norms])):
        raise PlanError(f"in one process the losses are {training.losses}", "losses that are numbers")
    if not training.gradients or max(training.norms) == 0:
        raise PlanError("in one process there is no gradient", "a model with something to train")
    return training


def measure(subject: Subject, expected: Training, plan: Plan) -> Equivalence:
    """Returns how far the accelerator, under the plan that it uses, is from `expected`.

    Raises:
        PlanError: The plan is refused for this model.
        Exception: A worker raised it.
    """
    with as_a_fresh_process():
        got = train(subject, "cuda")
    return compare(got, expected, plan)


def compare(got: Training, expected: Training, plan: Plan) -> Equivalence:
    """Returns the differences between two trainings and the verdict."""
    for kind, there, wanted in (
        ("gradient", got.gradients, expected.gradients),
        ("weight", got.weights, expected.weights),
    ):
        strangers = sorted(there.keys() ^ wanted.keys())
        if strangers:
            return Equivalence(str(plan), "wrong", f"only one side has a {kind} of {strangers[0]}")
        for name, tensor in wanted.items():
            if there[name].shape != tensor.shape:
                shapes = f"{tuple(there[name].shape)} instead of {tuple(tensor.shape)}"
                return Equivalence(str(plan), "wrong", f"the {kind} of {name} has the shape {shapes}")
    largest = max(float(tensor.abs().max()) for tensor in expected.gradients.values())
    loss, norm = worst_of_curve(got.losses, expected.losses), worst_of_curve(got.norms, expected.norms)
    gradient, gradient_name = worst(got.gradients, expected.gradients, SMALLEST_GRADIENT * largest)
    weight, weight_name = worst(got.weights, expected.weights, _SMALLEST_WEIGHT)
    bf16 = plan.precision == "bf16"  # in bfloat16 only the loss curve has a limit
    wrong = []
    if not loss <= (BF16_LOSS_LIMIT if bf16 else LOSS_LIMIT):
        wrong.append(f"a loss differs by {loss:.1e}")
    most_elements = max(tensor.numel() for tensor in expected.gradients.values())
    if not bf16 and not norm <= max(GRADIENT_LIMIT, NORM_ROUNDING * most_elements):
        wrong.append(f"a gradient norm differs by {norm:.1e}")
    if not bf16 and not gradient <= GRADIENT_LIMIT:
        wrong.append(f"the gradient of {gradient_name} differs by {gradient:.1e}")
    if not bf16 and not weight <= WEIGHT_LIMIT:
        wrong.append(f"the weight {weight_name} differs by {weight:.1e}")
    return Equivalence(
        plan=str(plan),
        verdict="wrong" if wrong else "verified",
        reason="; ".join(wrong),
        loss=loss,
        norm=norm,
        gradient=gradient,
        gradient_name=gradient_name,
        weight=weight,
        weight_name=weight_name,
    )


def worst(got: dict[str, Tensor], expected: dict[str, Tensor], smallest: float) -> tuple[float, str]:
    """Returns the largest difference relative to the largest element of its tensor, or to `smallest`, and its tensor.

    Args:
        got: Tensors by name, with all names and shapes of `expected`.
        expected: The tensors to compare with.
        smallest: The lower limit of what a difference is relative to.
    """
    found = [(0.0, "")]
    for name, tensor in expected.items():
        if tensor.numel() == 0:
            continue
        wanted, there = tensor.double(), got[name].double()
        difference = (there - wanted).abs().masked_fill(there == wanted, 0.0).max()  # a mask has -inf on both sides
        largest = wanted.masked_fill(~wanted.isfinite(), 0.0).abs().max()
        relative = float(difference / largest.clamp(min=smallest))
        found.append((relative if isfinite(relative) else float("inf"), name))
    return max(found)


def worst_of_curve(got: list[float], expected: list[float]) -> float:
    """Returns the largest difference of two equally long series, relative to the expected; inf if one is no number."""
    relative = [abs(a - b) / max(abs(b), _SMALLEST_WEIGHT) for a, b in zip(got, expected, strict=True)]
    return max(relative) if all(map(isfinite, relative)) else float("inf")
