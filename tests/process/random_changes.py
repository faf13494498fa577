"""What a script may change between steps, each change as scripts write it: weights, buffers, attributes, layers, hooks,
gradients, the optimizer and its state. `CHANGES` has them by name; `random_programs.py` draws from it.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from random_training import CLASSES, SETTINGS, Block, Program, Residual, Scale
from torch import Tensor, nn
from torch.nn.utils import prune

CHANGES: dict[str, Callable[[Program], Any]] = {}


def change(function: Callable[[Program], Any]) -> Callable[[Program], Any]:
    CHANGES[function.__name__] = function
    return function


@change
def scale_a_weight(program: Program) -> None:
    with torch.no_grad():
        program.parameter().mul_(0.9)


@change
def assign_data(program: Program) -> None:
    parameter = program.parameter()
    parameter.data = parameter.data * 0.95


@change
def write_into_views(program: Program) -> None:
    weight = program.linear().weight
    weight.data[:, 1].mul_(1.5)
    weight.data.view(-1)[3] = 0.25
    with torch.no_grad():
        weight[0] = 0.0


@change
def clamp_weights(program: Program) -> None:
    for parameter in program.model.parameters():
        parameter.data.clamp_(-0.5, 0.5)


@change
def weights_as_a_vector(program: Program) -> None:
    vector = nn.utils.parameters_to_vector(program.model.parameters())
    nn.utils.vector_to_parameters(vector * 0.99, program.model.parameters())


@change
def another_parameter(program: Program) -> None:
    if not program.has_tied_head:
        program.model.head.weight = nn.Parameter(program.model.head.weight.detach() * 0.9)
        program.new_optimizer()


@change
def another_head(program: Program) -> None:
    if not program.has_tied_head:
        program.model.head = nn.Linear(program.model.head.in_features, CLASSES).to(program.device)
        program.new_optimizer()


@change
def another_block(program: Program) -> None:
    if isinstance(program.model, Residual):
        program.model.blocks.append(Block().to(program.device))
        program.model.weights.append(1.0)
        program.optimizer.add_param_group({"params": list(program.model.blocks[-1].parameters())})


@change
def prune_a_weight(program: Program) -> None:
    if not program.has_tied_head:
        linear = program.linear()
        prune.l1_unstructured(linear, "weight", 0.3)
        prune.remove(linear, "weight")
        program.new_optimizer()


@change
def exchange_blocks(program: Program) -> None:
    if isinstance(program.model, Residual):
        blocks = program.model.blocks
        blocks[0], blocks[1] = blocks[1], blocks[0]


@change
def another_activation(program: Program) -> None:
    for block in program.parts(Block):
        block.activation = nn.SiLU()


@change
def freeze(program: Program) -> None:
    program.parameter().requires_grad_(False)


@change
def unfreeze(program: Program) -> None:
    program.model.requires_grad_(True)


@change
def attributes(program: Program) -> None:
    SETTINGS["gain"] *= 1.1
    program.model.weights[0] *= 0.9
    for scale in program.parts(Scale):
        scale.factor += 0.1


@change
def buffers(program: Program) -> None:
    for scale in program.parts(Scale):
        scale.offset.add_(0.05)
    for norm in program.parts(nn.BatchNorm2d):
        norm.running_mean.mul_(0.5)
        norm.momentum = 0.3


@change
def other_buffers(program: Program) -> None:
    for scale in program.parts(Scale):
        scale.offset = torch.full_like(scale.offset, 0.1)
    for norm in program.parts(nn.BatchNorm2d):
        norm.reset_running_stats()


@change
def evaluation_mode(program: Program) -> None:
    program.model.eval()


@change
def training_mode(program: Program) -> None:
    program.model.train()


@change
def dropout(program: Program) -> None:
    program.model.drop.p = 0.2


@change
def evaluate(program: Program) -> None:
    program.model.eval()
    with torch.inference_mode(program.draw.random() < 0.5), torch.no_grad():
        program.read(program.loss())
    program.model.train()


@change
def functional_call(program: Program) -> None:
    halved = {name: 0.5 * one.detach() for name, one in program.model.named_parameters()}
    x, _ = program.batch()
    given: Any = (halved, dict(program.model.named_buffers())) if program.draw.random() < 0.5 else halved
    with torch.no_grad():
        program.read(torch.func.functional_call(program.model, given, (x,)).abs().mean())


@change
def inner_steps(program: Program) -> None:
    """Steps on copies of the weights, as meta-learning takes them: the second call has weights that were computed."""
    fast = {name: one for name, one in program.model.named_parameters() if one.requires_grad}
    x, targets = program.batch()
    for _ in range(2 if fast else 0):
        outputs = torch.func.functional_call(program.model, fast, (x,)).flatten(0, -2)
        loss = F.cross_entropy(outputs, targets.flatten())
        gradients = torch.autograd.grad(loss, list(fast.values()), allow_unused=True)
        pairs = zip(fast.items(), gradients)
        fast = {name: one if gradient is None else one - 0.1 * gradient for (name, one), gradient in pairs}
        program.read(loss)


@change
def average(program: Program) -> None:
    if program.average is None:
        program.average = copy.deepcopy(program.model)
    pairs = zip(program.average.parameters(), program.model.parameters())
    with torch.no_grad():
        for mean, now in pairs:
            if mean.shape == now.shape:
                mean.lerp_(now, 0.5)


@change
def exchange_with_the_average(program: Program) -> None:
    if program.average is not None:
        for mean, now in zip(program.average.parameters(), program.model.parameters()):
            if mean.shape == now.shape:
                mean.data, now.data = now.data, mean.data


@change
def distill(program: Program) -> None:
    if program.average is not None:
        x, _ = program.batch()
        with torch.no_grad():
            wanted = program.average(x)
        loss = F.mse_loss(program.model(x), wanted)
        if loss.requires_grad:
            loss.backward()
        program.read(loss)


@change
def keep_the_state(program: Program) -> None:
    program.kept = copy.deepcopy(program.model.state_dict())


@change
def put_the_state_back(program: Program) -> None:
    if program.kept is not None and program.kept.keys() == program.model.state_dict().keys():
        program.model.load_state_dict(program.kept)


@change
def save_and_load(program: Program) -> None:
    file = io.BytesIO()
    torch.save({"model": program.model.state_dict(), "optimizer": program.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, map_location=program.device)
    program.model.load_state_dict(saved["model"])
    program.optimizer.load_state_dict(saved["optimizer"])


@change
def copy_the_model(program: Program) -> None:
    program.model = copy.deepcopy(program.model)
    program.new_optimizer()


@change
def to_the_cpu_and_back(program: Program) -> None:
    program.model.cpu()
    with torch.no_grad():
        for parameter in program.model.parameters():
            parameter.mul_(0.99)
    program.model.to(program.device)


@change
def to_double_and_back(program: Program) -> None:
    program.model.double()
    program.model.float()


@change
def settings_of_groups(program: Program) -> None:
    for group in program.optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] = 0.05


@change
def optimizer_anew(program: Program) -> None:
    program.new_optimizer()


@change
def clear_the_optimizer_s_state(program: Program) -> None:
    program.optimizer.state.clear()


@change
def scale_the_optimizer_s_state(program: Program) -> None:
    for entries in program.optimizer.state.values():
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.dim():
                entries[name] = 0.5 * value


@change
def shorten_a_group(program: Program) -> None:
    group = program.optimizer.param_groups[0]
    if len(group["params"]) > 2:
        group["params"] = group["params"][:-1]


@change
def hook_on_outputs(program: Program) -> None:
    program.handles.append(program.linear().register_forward_hook(lambda module, args, output: output * 1.05))


@change
def hook_on_inputs(program: Program) -> None:
    program.handles.append(program.linear().register_forward_pre_hook(lambda module, args: (args[0] + 0.01,)))


@change
def hook_on_a_parameter(program: Program) -> None:
    parameter = program.parameter()
    if parameter.requires_grad:
        program.handles.append(parameter.register_hook(lambda gradient: gradient * 0.5))


@change
def no_hooks(program: Program) -> None:
    while program.handles:
        program.handles.pop().remove()


@change
def another_forward(program: Program) -> None:
    linear = program.linear()
    linear.forward = lambda x: F.linear(x, linear.weight, linear.bias) * 1.1  # type: ignore[method-assign]


@change
def usual_forward(program: Program) -> None:
    for module in program.model.modules():
        if "forward" in vars(module):
            del module.forward


@change
def clip_gradients(program: Program) -> None:
    program.after_backward.append(
        lambda: program.read(nn.utils.clip_grad_norm_(program.model.parameters(), 0.5)) if program.gradients() else None
    )


@change
def change_gradients(program: Program) -> None:
    def in_place() -> None:
        for gradient in program.gradients():
            gradient.clamp_(-0.05, 0.05).add_(0.01)

    program.after_backward.append(in_place)


@change
def replace_gradients(program: Program) -> None:
    def replace() -> None:
        for parameter in program.model.parameters():
            if parameter.grad is not None:
                parameter.grad = None if program.draw.random() < 0.1 else 0.5 * parameter.grad

    program.after_backward.append(replace)


@change
def delete_gradients(program: Program) -> None:
    def delete() -> None:
        for parameter in program.model.parameters():
            del parameter.grad

    program.after_backward.append(delete)


@change
def accumulate(program: Program) -> None:
    program.accumulated = program.draw.choice([1, 2, 3])


@change
def another_number_of_rows(program: Program) -> None:
    program.rows = program.draw.choice([4, 7, 8])


@change
def penalize_weights(program: Program) -> None:
    program.penalty = lambda: 1e-3 * sum(one.square().sum() for one in program.model.parameters())  # type: ignore[return-value]


@change
def no_penalty(program: Program) -> None:
    program.penalty = None


@change
def step_by_hand(program: Program) -> None:
    trained = [one for one in program.model.parameters() if one.requires_grad]
    loss = program.loss()
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients):
                if gradient is not None:
                    parameter -= 0.05 * gradient
    program.read(loss)


@change
def two_calls_in_one_loss(program: Program) -> None:
    (x, _), (other, _) = program.batch(), program.batch()
    loss = (program.model(x) - program.model(other).detach()).square().mean()
    if loss.requires_grad:
        loss.backward()
    program.read(loss)


@change
def rows_that_meet(program: Program) -> None:
    if not program.has_tied_head:
        x, _ = program.batch()
        rows = F.normalize(program.model(x), dim=1)
        loss = F.cross_entropy(rows @ rows.T, torch.arange(len(rows), device=program.device))
        if loss.requires_grad:
            loss.backward()
        program.read(loss)
