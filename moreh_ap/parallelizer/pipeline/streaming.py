"""A forward without gradients of a model that is cut into stages: every worker runs the whole model on its own rows.

Decides when a worker has another stage's parameters, and for how long. Must not know what the forward is for.

[Note: why not the schedule]
Evaluation and generation ask for things that are spread over stages: key-value caches, hidden states, attention maps,
calls of single modules. So the parameters travel instead of the activations: before a block (or a module outside
the blocks) runs, the worker that holds it sends its parameters to the other stages, which drop them afterwards. The
stages share the batch like replicas meanwhile. One block at a time is in memory beside the worker's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from moreh_ap.parallelizer.call.extension import CallExtension, Findings, Forward
from moreh_ap.parallelizer.data.fsdp import compute_dtype
from moreh_ap.parallelizer.pipeline.stages import Stages
from moreh_ap.parallelizer.precision.output_precision import as_promised
from moreh_ap.parallelizer.tensor.split_tensor import is_no_plain_container


class Streaming(CallExtension):
    """Brings parameters of other stages to this worker while a forward runs.

    Args:
        module: The model, cut into stages.
        stages: This worker's stages.
    """

    def __init__(self, module: nn.Module, stages: Stages) -> None:
        self._module, self._stages = module, stages
        self._active = False
        self._dtype = compute_dtype(module)
        self._managers: dict[int, FSDPModule] = {}  # of modules that are not FSDP2's own roots: who gathers them
        for stage in stages.local.values():
            for submodule in stage.others:
                if isinstance(stage, FSDPModule):
                    self._managers[id(submodule)] = stage
        for path, unit in self._units():
            names = [name for name, _ in unit.named_parameters(prefix=path)]
            if names:
                travels = not all(name in stages.everywhere for name in names)
                owner = stages.holder_of_all(names) if travels else None
                unit.register_forward_pre_hook(self._fetcher(unit, owner), with_kwargs=True, prepend=True)
                unit.register_forward_hook(self._dropper(unit, owner), always_call=True)

    def _units(self) -> Iterator[tuple[str, nn.Module]]:
        body = self._stages.body
        for path, submodule in self._module.named_modules():
            parent = path.rpartition(".")[0]
            outside = path != body and not path.startswith(f"{body}.")
            if parent == body or (outside and next(submodule.children(), None) is None):
                yield path, submodule

    def around_forward(self, findings: Findings, module: nn.Module, forward: Forward) -> Forward:
        """Returns a forward through all stages' modules; every worker of the pipeline has to run the same."""
        if module is not self._module:
            return forward

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if self._dtype is not None:
                args, kwargs = _cast((args, dict(kwargs)), self._dtype)
            self._active = True
            try:
                result = forward(args, kwargs)
            finally:
                self._active = False
            return result if self._dtype is None else as_promised(result, self._dtype, torch.float32)

        return run

    def _fetcher(self, unit: nn.Module, owner: int | None) -> Any:
        def fetch(submodule: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self._active:
                return None
            mine = owner is None or self._stages.axis.rank == owner
            if mine and id(unit) in self._managers:
                self._managers[id(unit)].unshard()
            if owner is not None:
                for holder in unit.modules():
                    for name, param in holder._parameters.items():
                        if param is not None:
                            self._broadcast(holder, name, param, owner, mine)
            return None if mine or self._dtype is None else (_cast(args, self._dtype), _cast(kwargs, self._dtype))

        return fetch

    def _broadcast(self, holder: nn.Module, name: str, param: nn.Parameter, owner: int, mine: bool) -> None:
        axis = self._stages.axis
        value = param.detach()
        if not mine:
            casts = self._dtype is not None and param.is_floating_point() and param.ndim > 0
            value = torch.empty(param.shape, dtype=self._dtype if casts else param.dtype, device=self._stages.device)
        dist.broadcast(value, group=axis.group, group_src=owner)
        if not mine:
            received = nn.Parameter(value, requires_grad=False)
            received._moreh_own = param  # type: ignore[attr-defined]
            holder._parameters[name] = received

    def _dropper(self, unit: nn.Module, owner: int | None) -> Any:
        def drop(submodule: nn.Module, args: Any, result: Any) -> None:
            if not self._active:
                return
            if owner is None or self._stages.axis.rank == owner:
                if id(unit) in self._managers:
                    self._managers[id(unit)].reshard()
                return
            for holder in unit.modules():
                for name, param in holder._parameters.items():
                    if param is not None and hasattr(param, "_moreh_own"):
                        holder._parameters[name] = param._moreh_own

        return drop


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, values, is_leaf=is_no_plain_container)
