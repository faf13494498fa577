"""A small copy of a model and of one of its calls, for training beside the real one.

Decides what stays of the model and of the batch. An unmodified model of transformers is built again from its
configuration, narrow and short. Any other model keeps its width and loses blocks. Values come from a seed, buffers are
the real ones. The script's own model, its hooks and its random numbers are not touched.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import PlanError
from moreh_ap.integrations.transformers_reduced import cut_config, depth_with_every_kind, reduce_config, without_dropout
from moreh_ap.plan import Plan
from moreh_ap.protocol.blocks import block_lists
from moreh_ap.protocol.objects.picture_rows import find_pictures
from moreh_ap.protocol.pytree import flatten
from moreh_ap.protocol.script_code.replaced_forwards import has_another_forward
from moreh_ap.session.verification.equivalence import Subject, Training, as_a_fresh_process, reference

SEED = 2024
SPREAD = 0.1
"""Standard deviation of weights. With 0.02, as models start, attention is nearly uniform: a wrong mask shows little."""
LARGEST_COPY_BYTES = 1 << 30
"""Of parameters in float32; training needs about five times that in this process."""
_LONGEST = 32
"""Positions of a sequence that are kept where the call allows it."""
_LIBRARIES = ("torch.", "transformers.")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_EXTRA_RESULTS = {"output_hidden_states", "output_attentions", "output_router_logits"}


def depth_for(plan: Plan) -> int:
    """Returns how many blocks a copy needs for the plan: one for each stage, at least two, or the plan's own."""
    return sum(plan.layers) if plan.layers else max(2, plan.num_stages)


def rows_for(plan: Plan) -> int:
    """Returns the number of rows with which every device has one in every micro-batch."""
    return max(2, plan.data_parallel * plan.micro_batches)


def reduce_call(root: nn.Module, call: Call, rows: int, depth: int) -> tuple[Subject, Training]:
    """Returns a small copy of a model and of one call of it or a submodule, and their training in this process.

    It tries, in this order: a model built again from its configuration, the model with `depth` blocks, the model with
    all its blocks (a forward may count them).

    Raises:
        PlanError: The copy would be too large, the model cannot be copied, or no copy trains in one process.
    """
    ways = [(True, depth)] if is_from_configuration(root) else []
    most = max((len(blocks) for blocks in block_lists(root).values()), default=0)
    ways += [(False, depth), (False, most)] if most > depth else [(False, depth)]
    problem: Exception | None = None
    for narrow, kept in ways:
        try:
            subject = _reduce(root, call, rows, kept, narrow)
            return subject, reference(subject)
        except Exception as error:  # of any class: the copy runs the model's own code; the next reduction is tried
            problem = problem or error
    raise PlanError(
        f"no small copy of {type(root).__name__} trains in one process: {type(problem).__name__}: {problem}",
        "a model whose forward does not depend on its number of blocks, and draws no random numbers in evaluation",
    ) from problem


def _reduce(root: nn.Module, call: Call, rows: int, depth: int, narrow: bool) -> Subject:
    module, args, kwargs = call
    path = next(path for path, submodule in root.named_modules() if submodule is module)
    args, kwargs = tree_map_only(Tensor, _on_host, (args, kwargs))
    if narrow:
        copied = _from_configuration(root, depth, _length(args, kwargs))
        args, kwargs = _fit_into_vocabulary(*_shorten(args, kwargs), getattr(copied.config, "vocab_size", 0))
    else:
        copied = _cut(root, depth)
    if "use_cache" in kwargs:  # the first call may be one of `generate`
        kwargs = {**kwargs, "use_cache": False, "past_key_values": None}
    kwargs = {name: value for name, value in kwargs.items() if name not in _EXTRA_RESULTS}  # or one of evaluation
    return Subject(copied, (_with_rows(args, kwargs, rows),), path)


def subject_of(module: nn.Module, calls: tuple[Any, ...]) -> Subject:
    """Returns a module that is already small, with values from the seed, and its calls."""
    fill(module)
    _calm(module)
    return Subject(module.float().train(), calls)


# -- models ------------------------------------------------------------------------------------------------------------


def is_from_configuration(root: nn.Module) -> bool:
    """Returns whether a model is unmodified: its class builds the same from its transformers configuration."""
    config = getattr(root, "config", None)
    if not hasattr(config, "model_type") or not is_of_libraries(root) or has_another_forward(root):
        return False
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            fresh = type(root)(copy.deepcopy(config))  # type: ignore[call-arg]
    except (TypeError, ValueError, AttributeError):
        return False  # its class is not made from a configuration alone
    return _shapes(fresh) == _shapes(root)


def is_of_libraries(root: nn.Module, but_for_adapters: bool = False) -> bool:
    """Returns whether every submodule's class is of transformers or PyTorch, or of peft if that is allowed."""
    known = (*_LIBRARIES, "peft.") if but_for_adapters else _LIBRARIES
    return all(type(submodule).__module__.startswith(known) for submodule in root.modules())


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _from_configuration(root: nn.Module, depth: int, length: int) -> nn.Module:
    config = reduce_config(root.config, depth, length)  # type: ignore[attr-defined]
    if getattr(config, "_attn_implementation", None) not in ("eager", "sdpa"):
        config._attn_implementation = "eager"  # which every device has
    with as_a_fresh_process():
        copied = type(root)(config)  # type: ignore[call-arg]
    fill(copied)
    _calm(copied)
    return copied.float().train()


def _cut(root: nn.Module, depth: int) -> nn.Module:
    """Returns a copy of `root` as wide as it is, with the first `depth` blocks of every list."""
    parameters, buffers = dict(root.named_parameters()), dict(root.named_buffers())
    memo: dict[int, Any] = {
        id(tensor): nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor.requires_grad)
        for tensor in parameters.values()
    }
    # No pickle: unpickling a class of `__main__` in its own process replaces the methods of the script's class.
    attributes = [
        leaf for submodule in root.modules() for leaf in tree_leaves(vars(submodule)) if isinstance(leaf, Tensor)
    ]
    for tensor in [*buffers.values(), *attributes]:
        if id(tensor) not in memo:
            memo[id(tensor)] = _on_host(tensor).detach().clone()
    try:
        copied = copy.deepcopy(root, memo)
    except Exception as error:  # of any class: deepcopy calls code of the model's attributes
        raise PlanError(
            f"{type(root).__name__} cannot be copied: {type(error).__name__}: {error}",
            "modules whose attributes can be copied (no open files, locks or generators)",
        ) from error
    config = getattr(copied, "config", None)
    for path, blocks in block_lists(copied).items():
        kept = depth_with_every_kind(config, depth)
        if len(blocks) > kept:
            _cut_list(copied, path, len(blocks), kept)
    num_bytes = 4 * sum(parameter.numel() for parameter in copied.parameters())
    if num_bytes > LARGEST_COPY_BYTES:
        raise PlanError(
            f"a copy of {type(root).__name__} with {depth} blocks still has {num_bytes / 2**30:.1f} GiB of parameters",
            f"up to {LARGEST_COPY_BYTES / 2**30:.1f} GiB for a model that is not transformers' own",
        )
    _materialise(copied)
    fill(copied)
    _calm(copied)
    _drop_hooks(copied)
    return copied.float().train()


def _cut_list(root: nn.Module, path: str, before: int, depth: int) -> None:
    """Shortens the list at `path`, and the attributes around it that count its blocks."""
    blocks = root.get_submodule(path)
    del blocks[depth:]  # type: ignore[operator]
    owner, _, _ = path.rpartition(".")
    holders = [root]
    for name in owner.split(".") if owner else []:
        holders.append(getattr(holders[-1], name))
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if type(value) is int and value == before and any(word in name for word in ("layer", "block", "depth")):
                setattr(holder, name, depth)
        if hasattr(getattr(holder, "config", None), "model_type"):
            cut_config(holder.config, before, depth)


def _materialise(module: nn.Module) -> None:
    """Allocates every parameter that is still on meta; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                    made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                submodule._parameters[name] = made[id(parameter)]


def fill(module: nn.Module) -> None:
    """Sets parameters from the seed: scales of norms near one, all others small, none zero."""
    generator = torch.Generator(device="cpu").manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            if parameter.dim() >= 2:
                fan_in = parameter.numel() // parameter.shape[0] if parameter.dim() != 3 else parameter.shape[-1]
                values *= min(SPREAD, max(fan_in, 1) ** -0.5)
            else:
                values = values * SPREAD + (1.0 if name.endswith("weight") else 0.0)
            parameter.copy_(values)


def _calm(module: nn.Module) -> None:
    """Switches off dropout, and caches, which training does not need."""
    for submodule in module.modules():
        if isinstance(submodule, nn.modules.dropout._DropoutNd):
            submodule.p = 0.0
        without_dropout(submodule)
        config = getattr(submodule, "config", None)
        if config is not None and hasattr(config, "model_type"):
            without_dropout(config)
            config.use_cache = False


def _drop_hooks(module: nn.Module) -> None:
    """Removes the script's hooks: they would run for a model that the script does not have."""
    for submodule in module.modules():
        for kind in _HOOKS:
            hooks = getattr(submodule, kind)
            for key, hook in list(hooks.items()):
                if not str(getattr(hook, "__module__", type(hook).__module__)).startswith(_LIBRARIES):
                    del hooks[key]


# -- calls -------------------------------------------------------------------------------------------------------------


def _on_host(tensor: Tensor) -> Tensor:
    """Returns a CPU copy; floating-point tensors in float32, like the model copy."""
    plain = tensor.to_host() if isinstance(tensor, VirtualTensor) else tensor.detach().cpu().clone()
    return plain.float() if plain.is_floating_point() else plain


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]


def _length(args: Any, kwargs: Any) -> int:
    return max((tensor.shape[1] for tensor in _tensors(args, kwargs) if tensor.dim() > 1), default=0)


def _shorten(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Keeps `_LONGEST` positions around the first targets of long sequences, if every tensor is (B, T) or (B,)."""
    tensors, length = _tensors(args, kwargs), _length(args, kwargs)
    aligned = all(tensor.dim() <= 1 or tuple(tensor.shape[1:]) == (length,) for tensor in tensors)
    if length <= _LONGEST or not aligned:
        return args, kwargs
    start, labels = 0, kwargs.get("labels")
    if isinstance(labels, Tensor) and labels.dim() == 2:
        targets = (labels >= 0).any(0).nonzero()
        start = min(max(int(targets[0]) - _LONGEST // 2, 0), length - _LONGEST) if len(targets) else 0

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:, start : start + _LONGEST].contiguous() if tensor.dim() == 2 else tensor

    return tree_map_only(Tensor, cut, (args, kwargs))  # type: ignore[no-any-return]


def _fit_into_vocabulary(args: Any, kwargs: Any, vocabulary: int) -> tuple[Any, Any]:
    """Maps the ids of a large vocabulary to a small one; positions and ignored targets stay."""
    if not vocabulary:
        return args, kwargs

    def fit(tensor: Tensor) -> Tensor:
        return torch.where(tensor >= vocabulary, tensor % vocabulary, tensor) if tensor.dtype == torch.int64 else tensor

    positions = {name: value for name, value in kwargs.items() if "position" in name}
    args, kwargs = tree_map_only(Tensor, fit, (args, kwargs))
    return args, {**kwargs, **positions}


def _with_rows(args: Any, kwargs: Any, rows: int) -> tuple[Any, Any]:
    """Repeats or drops rows until the batch has `rows` rows."""
    present = next((tensor.shape[0] for tensor in _tensors(args, kwargs) if tensor.dim() > 0), 0)
    if not present:
        return args, kwargs
    items = find_pictures(args, kwargs)
    if items is not None:
        return items.select([row % items.count for row in range(rows)])
    index = torch.arange(rows) % present

    def pick(tensor: Tensor) -> Tensor:
        return tensor[index].contiguous() if tensor.dim() > 0 and tensor.shape[0] == present else tensor

    return tree_map_only(Tensor, pick, (args, kwargs))  # type: ignore[no-any-return]
