"""FSDP2 on a module: how it is wrapped, and how its state is kept in order between calls.

Decides what FSDP2 manages and in which precision it computes. Must not know batches, losses, stages' contents or the
controller.

[Note: every micro-batch]
Where a plan shards, the gradients of a micro-batch are reduced as soon as a block's backward has them, and added to the
shard: only one block's gradients at a time are whole, where all of them would take 4 bytes a parameter. The sum over
replicas of a shard waits for the last micro-batch, since what waits is a shard. Where nothing is sharded, gradients
wait for the last micro-batch, since a sum is as large as what it is made of. So they do in a pipeline: its stages keep
their parameters gathered for all micro-batches, these are many, and under the zero-bubble schedule the gradients of a
block's weights come later than those of its inputs, at which FSDP2 reduces.

[Note: parameters in host memory]
With `offload=all` the shards of parameters and gradients are in host memory, by FSDP2's own policy, and pinned where
the device is a GPU: a unit's shard is copied to the device before it is gathered, also where it is the whole unit, and
its reduced gradient is copied back. Nothing may stay on the device for longer than a unit is used, so gradients are
summed over replicas, too, after every micro-batch. Other parameters (`unshardable`) and buffers are on the device.
"""

from __future__ import annotations

import collections
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from moreh_ap.errors import PlanError
from moreh_ap.parallelizer.data.outer_layers import outer_layers, watch
from moreh_ap.parallelizer.data.recurrent_layers import keep_weights_apart
from moreh_ap.parallelizer.precision.computing_copies import computes_on_copies
from moreh_ap.parallelizer.precision.output_precision import PROMISES, results_in
from moreh_ap.plan import Plan
from moreh_ap.protocol.blocks import ModelGroup

_ATTRIBUTE = "_moreh_fsdp_roots"
_WAITING = "_moreh_fsdp_what_waits"
_MANAGED = "_is_fsdp_managed_module"
"""What FSDP2 sets on every module, for the compiler. See [Note: what a forward knows]."""


def uses_fsdp(module: nn.Module, plan: Plan) -> bool:
    """Says whether a plan is carried out by FSDP2, which shards parameters and brings them from host memory.

    It also adds up gradients in float32 of parameters that the script has in another precision. In a pipeline it keeps
    the copies of a stage for all micro-batches. Other plans in bfloat16 compute on copies (`computing_copies.py`).
    """
    if plan.shard > 1 or plan.offload == "all":
        return True
    if plan.precision == "fp32":
        return False
    adds_up = plan.micro_batches > 1 or plan.data_parallel > 1
    return plan.pipeline > 1 or (adds_up and any(_is_trained_in_low_precision(one) for one in module.parameters()))


def _is_trained_in_low_precision(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16)


def unshardable(module: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters that FSDP2 cannot manage: those without dims or elements, and rare dtypes.

    The gradients of a unit travel as one tensor, so all trainable parameters need one dtype: that of most elements.
    Complex weights (of a Fourier layer) beside real ones are left out.
    """
    parameters = list(module.parameters())
    sizes: collections.Counter[torch.dtype] = collections.Counter()
    for parameter in parameters:
        if parameter.requires_grad:
            sizes[parameter.dtype] += parameter.numel()
    usual = sizes.most_common(1)[0][0] if sizes else None
    return {
        one for one in parameters if one.ndim == 0 or one.numel() == 0 or (one.requires_grad and one.dtype != usual)
    }


def only_copied(module: nn.Module, plan: Plan) -> set[nn.Parameter]:
    """Returns the parameters of which FSDP2 would do nothing but make a copy, where no other worker has a part of the
    batch: they have the dtype in which the plan computes.

    With micro-batches, frozen ones alone: FSDP2 adds up the gradients of micro-batches in float32.
    """
    if plan.precision == "fp32" or plan.offload == "all":
        return set()
    return {
        one
        for one in module.parameters()
        if one.dtype == torch.bfloat16 and (plan.micro_batches == 1 or not one.requires_grad)
    }


def shard(
    module: nn.Module,
    roots: Sequence[nn.Module],
    blocks: Collection[nn.Module],
    plan: Plan,
    mesh: DeviceMesh,
    ignored: Collection[nn.Parameter],
) -> None:
    """Hands the parameters of `roots` to FSDP2, those of `blocks` and of large layers beside them one by one.

    Args:
        module: The whole model; `fsdp_modules(module)` finds what was wrapped.
        roots: What is called from outside: the module itself, or the stages of a pipeline that are here.
        blocks: Blocks to gather one at a time.
        plan: The plan.
        mesh: The mesh of the plan, with axes "replicate" and "shard" among others.
        ignored: Parameters that stay as they are.
    """
    compute = None if plan.precision == "fp32" else torch.bfloat16
    inner = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
    # Without replicas to sum over, an axis of one shard alone keeps no sum of the unit before.
    with_replicas = plan.replicate > 1 or (plan.shard == 1 and plan.offload != "all")
    fsdp_mesh = mesh["replicate", "shard"] if with_replicas else mesh["shard"]
    # A copy on every device frees no memory worth a second cast; a pipeline would gather again for each micro-batch.
    free_after_forward = plan.gathers_in_turn
    options: dict[str, Any] = {
        "mesh": fsdp_mesh,
        "reshard_after_forward": free_after_forward,
        "ignored_params": set(ignored),
    }
    if plan.offload == "all":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    if compute is not None:
        whole_precision = MixedPrecisionPolicy(cast_forward_inputs=False)
        for norm in [norm for root in roots for norm in batch_normalizations(root)]:
            if next(iter(norm.parameters()), None) is not None:  # its running statistics are in float32
                _shard_one(norm, mp_policy=whole_precision, **options)
    keep_weights_apart(roots)
    blocks = [block for root in roots for block in with_own_parameters(root, blocks)]
    for block in blocks:
        block.register_forward_hook(_own_outputs)
        _shard_one(block, mp_policy=inner, **options)
    for root in roots:
        layers = outer_layers(root, blocks, ignored) if free_after_forward else []
        for layer in layers:
            layer.register_forward_hook(_own_outputs)
            _shard_one(layer, mp_policy=MixedPrecisionPolicy(compute, inner.reduce_dtype, None, False), **options)
        _shard_one(root, mp_policy=inner, **options)
        # What a root returns is copied into an answer: nothing in this process changes it in place.
        name = re.escape(type(root).__name__)
        warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({name}\) returned a view tensor")
        watch(root, layers)
        compiled = {inner for block in blocks for inner in block.modules()} if plan.compile == "blocks" else set()
        for unaware in set(root.modules()) - compiled:
            vars(unaware).pop(_MANAGED, None)
        if compute is not None and getattr(root, "is_last", True):
            root.register_forward_hook(results_in(compute, torch.float32))
    object.__setattr__(module, _ATTRIBUTE, list(roots))
    if compute is not None:
        object.__setattr__(module, PROMISES, True)
    _set_sums(module, plan)


def _set_sums(module: nn.Module, plan: Plan) -> None:
    """Has FSDP2 add up gradients undivided, and notes which sums wait for the last micro-batch."""
    waiting = "everything" if plan.shard == 1 else "replicas" if plan.replicate > 1 else "nothing"
    if plan.offload == "all":
        waiting = "nothing"  # see [Note: parameters in host memory]
    object.__setattr__(module, _WAITING, waiting)
    for submodule in fsdp_modules(module):
        if plan.data_parallel > 1 or plan.offload != "all":  # FSDP2 copies the gradients of one device to divide them
            submodule.set_gradient_divide_factor(1.0)
        submodule.set_force_sum_reduction_for_comms(True)


def batch_normalizations(module: nn.Module) -> list[nn.Module]:
    """Returns the layers of a module that compute in float32 under every plan: their statistics are in it."""
    return [submodule for submodule in module.modules() if isinstance(submodule, _BatchNorm)]


def with_own_parameters(root: nn.Module, blocks: Collection[nn.Module]) -> list[nn.Module]:
    """Returns the blocks of `root` none of whose parameters another block, or the rest of the model, has too: a
    parameter belongs to one unit. The others stay with the rest of the model."""
    owners = collections.Counter(id(parameter) for block in blocks for parameter in block.parameters())
    inside, rest = {id(block) for block in blocks}, [root]
    outside: set[int] = set()
    for module in rest:  # grows
        outside.update(id(parameter) for parameter in module._parameters.values() if parameter is not None)
        rest += [child for child in module.children() if id(child) not in inside]
    members = {id(module) for module in root.modules()}
    own = [block for block in blocks if id(block) in members]
    return [
        block for block in own if all(owners[id(one)] == 1 and id(one) not in outside for one in block.parameters())
    ]


def _shard_one(module: nn.Module, **options: Any) -> None:
    """Shards a module. FSDP2 gives it a class of its own, which a wrapper that passes on what is set would pass on."""
    kind = type(module)
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and kind.forward is nn.Module.forward:
        kind = type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": ModelGroup.forward})
        object.__setattr__(module, "__class__", kind)
    if kind.__setattr__.__module__.startswith("torch."):  # a recurrent layer keeps its weights in a list as well
        fully_shard(module, **options)
        return
    plain = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__setattr__": nn.Module.__setattr__})
    object.__setattr__(module, "__class__", plain)
    fully_shard(module, **options)
    del plain.__setattr__  # from now on its class decides again


def _own_outputs(block: nn.Module, args: object, output: Any) -> Any:
    """Gives a block's outputs memory of their own: an in-place operation on a view would drop FSDP2's backward hook."""
    return tree_map_only(torch.Tensor, _own_memory, output)


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():  # the tensor as it is: modes of a forward may have another in its place
        is_view = tensor._is_view()
    return tensor.clone() if is_view else tensor


def calling(module: nn.Module, target: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what runs `target`, a part of `module` or a method of one, with the parameters there that it computes on.

    Where FSDP2 manages the module as a whole, its hooks on the module gather what the module owns itself; so do hooks
    on the module put copies in the place of parameters.
    """
    if module not in fsdp_roots(module) and not computes_on_copies(module):
        return target

    def call(*args: Any, **kwargs: Any) -> Any:
        with _forward_replaced(module, target):
            return nn.Module.__call__(module, *args, **kwargs)  # a `__call__` of its own may pass its hooks over

    return call


@contextmanager
def _forward_replaced(module: nn.Module, target: Callable[..., Any]) -> Iterator[None]:
    """Inside, calling `module` runs `target`."""
    own = module.__dict__.get("forward")
    object.__setattr__(module, "forward", target)
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            object.__setattr__(module, "forward", own)


def has_others_in_place(module: nn.Module) -> bool:
    """Says whether forwards of a module compute with other tensors than its parameters: gathered ones, or copies."""
    return bool(fsdp_roots(module)) or computes_on_copies(module)


def prepare(module: nn.Module) -> None:
    """Has FSDP2 settle what is a root and what is inside it, before parts are called one by one."""
    for root in fsdp_roots(module):
        root._get_fsdp_state()._lazy_init()


def fsdp_roots(module: nn.Module) -> list[FSDPModule]:
    """Returns the outermost parts that FSDP2 manages: the module itself, or the stages of a pipeline that are here."""
    return module.__dict__.get(_ATTRIBUTE, [])


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Returns everything that FSDP2 manages of `module`, the outermost first."""
    return [m for root in fsdp_roots(module) for m in root.modules() if isinstance(m, FSDPModule)]  # type: ignore[attr-defined]


BlockTrace = list[tuple[str, torch.Size | None]]
"""The blocks that a forward came to, in order: the path of each, and the shape of the first tensor it was given.

Others, such as masks, are left out where a row needs none."""


@contextmanager
def record_block_order(module: nn.Module) -> Iterator[BlockTrace]:
    """Notes in which order forwards inside come to the blocks that FSDP2 gathers one by one."""
    way: BlockTrace = []
    roots = fsdp_roots(module)
    names = {id(submodule): name for name, submodule in module.named_modules()}

    def note(block: nn.Module, args: Any, kwargs: Any) -> None:
        shapes = (leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        way.append((names.get(id(block), ""), next(shapes, None)))

    blocks = [one for one in fsdp_modules(module) if one not in roots and param_groups(one)]
    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]  # type: ignore[attr-defined]
    try:
        yield way
    finally:
        for hook in hooks:
            hook.remove()


def keeps_parameters_on_host(module: nn.Module) -> bool:
    """Says whether what FSDP2 manages of the module is in host memory. See [Note: parameters in host memory]."""
    groups = (group for submodule in fsdp_modules(module) for group in param_groups(submodule))
    return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)


def compute_dtype(module: nn.Module) -> torch.dtype | None:
    """Returns the dtype that FSDP2 computes in, None where it computes in that of the parameters."""
    submodules = fsdp_modules(module)
    return submodules[0]._get_fsdp_state()._mp_policy.param_dtype if submodules else None


@contextmanager
def before_the_last_backward(module: nn.Module) -> Iterator[None]:
    """Inside, a backward is followed by another one of the same step. See [Note: every micro-batch].

    After the last one outside, every gradient is the sum over all workers and all of these backwards.
    """
    waiting, outermost = module.__dict__.get(_WAITING, "nothing"), fsdp_roots(module)

    def sums(flag: bool) -> None:
        for root in outermost:
            if waiting == "everything":
                root.set_requires_gradient_sync(flag)
            elif waiting == "replicas":
                root.set_requires_all_reduce(flag)

    sums(False)
    try:
        yield
    finally:
        sums(True)


def settle(module: nn.Module) -> None:
    """Puts the shards back in place as the module's parameters, wherever forward left whole ones.

    Call it before parameters are read, written or listed outside forward and backward. It talks to no other worker.
    """
    for submodule in fsdp_modules(module):
        submodule.reshard()


def set_requires_grad(module: nn.Module, flags: Mapping[str, bool]) -> None:
    """Freezes or frees parameters after a plan was applied.

    Args:
        module: The module `apply_plan` changed.
        flags: Full parameter name -> whether it gets gradients. Names that are missing keep what they had.

    Raises:
        PlanError: A name is no parameter of the module.
    """
    settle(module)
    params = dict(module.named_parameters(remove_duplicate=False))
    for name, flag in flags.items():
        if name not in params:
            raise PlanError(f"no parameter is called {name!r}", "one of the module's parameter names")
        params[name].requires_grad_(flag)


def recover(module: nn.Module) -> None:
    """Brings FSDP2 back to rest after a forward or backward that raised, so that the next call can run."""
    for submodule in fsdp_modules(module):
        state = submodule._get_fsdp_state()
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False  # else no later backward reduces gradients
        for group in param_groups(submodule):
            group._training_state = TrainingState.IDLE
            group._partial_reduce_output = None  # of micro-batches before the error
            for param in group.fsdp_params:
                if (whole := getattr(param, "unsharded_param", None)) is not None:
                    whole.grad = None  # of the backward that raised
    settle(module)


def has_gradients_to_reduce(module: nn.Module) -> bool:
    """Says whether gradients wait for the last micro-batch of a step. See [Note: every micro-batch]."""
    groups = [group for submodule in fsdp_modules(module) for group in param_groups(submodule)]
    waiting = [one for group in groups for one in group.fsdp_params if one.unsharded_accumulated_grad is not None]
    return bool(waiting) or any(group._partial_reduce_output is not None for group in groups)


def param_groups(submodule: FSDPModule) -> list[Any]:
    """Returns the groups of parameters that FSDP2 gathers and reduces together for something that it manages."""
    state = submodule._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; one group, or None, before
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def set_param_groups(submodule: FSDPModule, groups: list[Any]) -> None:
    """Sets which groups of parameters FSDP2 gathers for something that it manages, at a time when none is gathered."""
    state = submodule._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.13; one group, or None, before
        state._fsdp_param_groups = groups
    else:
        state._fsdp_param_group = groups[0] if groups else None  # type: ignore[misc]
