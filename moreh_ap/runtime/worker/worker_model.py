"""A worker's share of a model: how it is built, what is set on it, and its parameters, gradients and buffers by name.

The mathematics is the parallelizer's; this module translates between messages and it. How its calls run is for
`call_preparation.py` to decide.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moreh_ap.errors import UnsupportedError
from moreh_ap.integrations import bitsandbytes_worker, transformers_worker
from moreh_ap.parallelizer.apply import Example, apply_plan
from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.parameter_writes import keep_parameters
from moreh_ap.parallelizer.call.reports import Reports
from moreh_ap.parallelizer.compiling.compiled_blocks import use_compiled_blocks
from moreh_ap.parallelizer.data.fsdp import fsdp_roots, prepare, set_requires_grad, settle
from moreh_ap.parallelizer.loss import chunked_cross_entropy
from moreh_ap.parallelizer.mesh import build_mesh
from moreh_ap.parallelizer.state.loading import Piece, fill, pieces
from moreh_ap.parallelizer.state.state_shard import StateShard
from moreh_ap.plan import Plan
from moreh_ap.protocol.memory_format import KernelFormats
from moreh_ap.protocol.messages.models import BuildModel, ExampleCall
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.protocol.model_settings import Settings
from moreh_ap.protocol.module_attributes import Attributes, full_name, num_leaves
from moreh_ap.protocol.pytree import Nesting
from moreh_ap.protocol.script_code.script_globals import VariablesOfModel, is_variable
from moreh_ap.protocol.skeleton import pickle_object, unpickle_attribute, unpickle_skeleton
from moreh_ap.runtime.worker.cache_arguments import without_cache
from moreh_ap.runtime.worker.unseen_changes import UnseenChanges
from moreh_ap.runtime.worker.worker_device import WorkerDevice


@dataclass(frozen=True)
class Moment:
    """Settings of a model at one of its calls: attributes that the script changed, and training flags."""

    number: int
    values: dict[tuple[str, str], Any]
    training: bytes


class WorkerModel:
    """One model under its plan, with this worker's state shards loaded."""

    def __init__(self, command: BuildModel, device: WorkerDevice) -> None:
        self.device, self.plan = device, Plan.parse(command.plan)
        if command.compiles_later:
            self.plan = self.plan.with_compiled_blocks()
        aliases: list[tuple[str, Tensor]] = []
        self.module = self._unpickle(command, aliases)
        kind = type(self.module)  # FSDP2 derives another class
        self.meta_module = (
            self._unpickle(command, []) if self.plan.micro_batches > 1 or self.plan.pipeline > 1 else None
        )
        self.modules = list(self.module.modules())
        # Whether calls are computed again, or only in their backward.
        self.runs_later = self.plan.recompute != "none" or self.plan.micro_batches > 1 or self.plan.pipeline > 1
        self.mesh = mesh = build_mesh(self.plan, device.torch_device.type)
        example = self._example(command.example)
        chunked_cross_entropy.use_for(self.module)
        self.applied = apply_plan(self.module, self.plan, mesh, device.torch_device, example, command.compiled)
        if command.compiles_later:
            use_compiled_blocks(self.module, False)
        fill(self.module, command.sources, device.torch_device, self.applied.layouts, self.applied.absent)
        prepare(self.module)
        # The objects stay the same from here on: FSDP2 puts others in their place only during a call.
        self.settle()
        self._checked_cuts: set[Hashable] = set()
        self.is_sharded = bool(fsdp_roots(self.module))
        self.parameters = dict(self.module.named_parameters())
        self._give_memory(aliases)
        self.is_canonical = {name: held.is_canonical for name in self.parameters if (held := self.parameter(name))}
        self.gradients_aside: dict[str, Tensor | None] | None = None
        self.settings = Settings()  # a changed attribute may couple the rows
        self._kernel_formats = KernelFormats(self.module)
        self._values: dict[tuple[str, str], Any] = {}
        self._originals: dict[tuple[str, str], Any] = {}
        self._variables: dict[tuple[int, str], VariablesOfModel] = {}
        keep_parameters(self.module)
        # Under other plans a part of a model, or of its rows, sets a part of what one device would find: then it is
        # only noticed.
        answers_attributes = self.plan.tensor == self.plan.pipeline == self.plan.micro_batches == 1
        attributes = Attributes(self.module, with_buffers=answers_attributes) or None
        self.unseen = None if answers_attributes else attributes
        self._marks = {} if self.unseen is None else self.unseen.marks()
        self._attributes, self._first_marks = attributes, {} if attributes is None else attributes.marks()
        looks_at_backward = answers_attributes and self.plan.recompute == "none"
        self.faults: list[str] = []  # tracebacks of our own errors, not sent to the script yet
        self.unseen_changes = UnseenChanges(kind, attributes if looks_at_backward else None)
        reports = Reports(self.module, attributes if answers_attributes else None, answers=answers_attributes)
        self.extensions = (*self.applied.extensions, reports) if reports.is_needed else self.applied.extensions

    def _give_memory(self, aliases: list[tuple[str, Tensor]]) -> None:
        """Has tensors that the model keeps beside its parameters share their memory, as they do in the script."""
        if not aliases:
            return
        tensors = {**dict(self.module.named_buffers()), **self.parameters}
        for name, alias in aliases:
            if self.is_sharded or name in self.applied.layouts or name in self.applied.absent:
                raise UnsupportedError(
                    f"an attribute of the model has the memory of {name}, which plan={str(self.plan)!r} splits.",
                    allowed="Plans with replicate alone, in float32, for such a model.",
                    fix=f'...(plan="replicate={self.plan.num_devices}", mixed_precision=False)',
                )
            torch.utils.swap_tensors(alias, tensors[name].detach())

    def _unpickle(self, command: BuildModel, aliases: list[tuple[str, Tensor]]) -> nn.Module:
        module = unpickle_skeleton(command.skeleton, self.device.torch_device, aliases)
        transformers_worker.complete_unpickled(module)
        bitsandbytes_worker.complete_unpickled(module)
        return module

    def _example(self, call: ExampleCall | None) -> Example | None:
        if call is None or self.meta_module is None:
            return None
        nesting = Nesting(call.pickled_treespec, call.pickled_constants)
        args, kwargs = nesting.fill([self.device.place(data) for data in call.tensors])
        return Example(self.meta_module, args, without_cache(self.module, kwargs))

    def check_cut(self, kind: Hashable, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Checks, once for each kind of training calls, that a pipeline was cut where such calls need it.

        Raises:
            UnsupportedError: It was not.
        """
        stages = self.applied.stages
        if stages is None or not call.grad or call.target is not None or kind in self._checked_cuts:
            return
        assert self.meta_module is not None
        stages.check(self.meta_module, args, kwargs)
        self._checked_cuts.add(kind)

    # -- settings and state ----------------------------------------------------------------------------------------

    def change(self, changes: tuple[tuple[str, str, bytes], ...]) -> None:
        """Set attributes of submodules; ``config.name`` reaches into a transformers config."""
        self.settings.set({(path, name): pickled for path, name, pickled in changes})
        for path, name, pickled in changes:
            holder, last = self._holder_of(self.module, path, name)
            self._originals.setdefault((path, name), getattr(holder, last, None))
            self._values[path, name] = unpickle_attribute(pickled, self.module, self.device.torch_device)
            self._set_attribute(path, name, self._values[path, name])
        if self.unseen is not None:  # what the script sets, no forward has set
            now = self.unseen.marks()
            names = {full_name(path, name) for path, name, _ in changes}
            self._marks.update((name, now[name]) for name in names & now.keys())

    def changed_unseen(self) -> list[str]:
        """Attributes that forwards have set, since the last time, and that are not answered with their results."""
        assert self.unseen is not None
        changed = list(self.unseen.changed(self._marks))
        self._marks = self.unseen.marks()
        return changed

    def attributes_since_made(self) -> dict[str, Any]:
        """Returns attributes that forwards have set or changed since the model was made, by full name."""
        if self._attributes is None:
            return {}
        found = self._attributes.changed(self._first_marks)
        of_script = {full_name(path, name): value for (path, name), value in self._values.items()}
        return {name: value for name, value in found.items() if name not in of_script or of_script[name] is not value}

    def set_attributes(self, values: dict[str, Any]) -> None:
        """Sets attributes as forwards have set them in another process."""
        for name, value in values.items():
            path, _, last = name.rpartition(".")
            vars(self.module.get_submodule(path))[last] = value
        if self.unseen is not None:
            self._marks = self.unseen.marks()

    def pickled_objects(self, names: tuple[str, ...]) -> dict[str, bytes]:
        """Attributes as they travel to the script, without those that cannot be pickled."""
        path_of, found = {id(module): path for path, module in self.module.named_modules()}, {}
        for name in names:
            path, _, last = name.rpartition(".")
            with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError, RuntimeError):
                value = getattr(self.module.get_submodule(path), last)
                if num_leaves(value) is not None:
                    continue  # what is set under a plan that does not answer it may be a part of it
                found[name] = pickle_object(value, path_of, self.device.torch_device)
        return found

    def _set_attribute(self, path: str, name: str, value: Any) -> None:
        for root in (self.module, self.meta_module):
            if root is not None:
                holder, last = self._holder_of(root, path, name)
                setattr(holder, last, value)

    def _holder_of(self, root: nn.Module, path: str, name: str) -> tuple[Any, str]:
        """Returns the object of which an attribute is set, and the attribute.

        ``config.name`` reaches into a configuration; some paths name variables outside of the model.
        """
        if is_variable(path):
            return self._variables_of(root, path), name
        holder: Any = root.get_submodule(path)
        *through, last = name.split(".")
        for step in through:
            holder = getattr(holder, step)
        return holder, last

    def _variables_of(self, root: nn.Module, path: str) -> VariablesOfModel:
        key = id(root), path
        if key not in self._variables:
            self._variables[key] = VariablesOfModel(root, path)
        return self._variables[key]

    def moment(self) -> Moment:
        """The present settings, with which a call that is computed later has to be computed."""
        return Moment(self.settings.number, dict(self._values), self.training())

    @contextmanager
    def computing_later(self, moment: Moment) -> Iterator[None]:
        """Inside, everything is set as it was at a moment."""
        now = self.moment()
        if (now.number, now.training) == (moment.number, moment.training):
            yield
            return
        self._set(moment)
        try:
            yield
        finally:
            self._set(now)

    def _set(self, moment: Moment) -> None:
        for (path, name), original in self._originals.items():
            self._set_attribute(path, name, moment.values.get((path, name), original))
        self.set_training(moment.training)

    def training(self) -> bytes:
        """The training mode of each submodule, in the order of ``modules()``."""
        return bytes([module.training for module in self.modules])

    def set_training(self, flags: bytes) -> None:
        """Set the training mode of each submodule, in the order of ``modules()``."""
        for module, flag in zip(self.modules, flags):
            module.training = bool(flag)

    def set_requires_grad(self, flags: dict[str, bool]) -> None:
        """Freeze or unfreeze parameters."""
        self.settings.set(flags)
        set_requires_grad(self.module, flags)

    def set_kernel_formats(self, formats: dict[str, torch.memory_format]) -> None:
        """Have convolutions return what they would if their kernels had these formats."""
        self.settings.set({(name, "memory_format"): format for name, format in formats.items()})
        self._kernel_formats.set(formats)

    def settle(self) -> None:
        """Have the parts of parameters in place before they are read or written outside a call."""
        settle(self.module)
        if self.plan.offload == "all":
            self.device.synchronize()  # copies to the device may still read the parts in host memory

    def placements(self) -> dict[str, str]:
        """For each parameter that is split, or that some workers do not hold, where its parts are."""
        found = {}
        for name in self.parameters:
            held = self.parameter(name)
            if held is not None and (self.applied.layouts or self.applied.stages):
                stage = self.applied.stages.first_holder_of(name) if self.applied.stages else 0
                found[name] = f"stage {stage}, {held.layout or 'full'}"
        return found

    def parameter(self, name: str) -> StateShard | None:
        """This worker's shard of a parameter, as the optimizer sees it; None if it is on other stages only."""
        if name in self.applied.absent:
            return None
        return self._held(self.parameters[name], name)

    @functools.cached_property
    def pieces(self) -> dict[str, tuple[tuple[int, ...], list[Piece]]]:
        """For each parameter that is here the shape of the whole, and which slices of it are which of the shard."""
        held = {name: self.parameter(name) for name in self.parameters}
        return {name: (one.shape, pieces(one.tensor, one.layout)) for name, one in held.items() if one is not None}

    def _held(self, tensor: Tensor, name: str) -> StateShard:
        stages, position = self.applied.stages, self.applied.position
        is_first = stages is None or stages.first_holder_of(name) == position.pipeline.rank
        return StateShard(tensor, position, self.applied.layouts.get(name), is_first)

    def state(self, ref: StateRef) -> StateShard | None:
        """A parameter, a gradient or a buffer by its name; None if it is on other stages only.

        Raises:
            RuntimeError: If a gradient is read that is not there.
        """
        if ref.kind == "buffer":
            stages, position = self.applied.stages, self.applied.position
            is_first = stages is None or stages.holder_of_buffer(ref.name) == position.pipeline.rank
            buffers = dict(self.module.named_buffers())  # not all are where `get_buffer` looks: a module may name them
            return StateShard(buffers[ref.name], position, is_first=is_first)
        held = self.parameter(ref.name)
        if held is None or ref.kind == "param":
            return held
        if held.tensor.grad is None:
            raise RuntimeError(
                f"the gradient of {ref.name} was read, but it is None: no backward reached it since it was cleared"
            )
        return self._held(_alias(held.tensor.grad), ref.name)

    def set_gradient(self, name: str, full: Tensor) -> None:
        """Replace a gradient by this worker's shard of `full`."""
        held = self.parameter(name)
        if held is None:
            return
        if held.tensor.grad is None:
            held.tensor.grad = torch.zeros_like(held.tensor)
        self._held(held.tensor.grad, name).write(full)

    def which_gradients(self) -> bytes:
        """Returns a byte for each parameter: whether it has a gradient here."""
        return bytes([parameter.grad is not None for parameter in self.parameters.values()])

    def put_gradients_aside(self, aside: bool) -> None:
        """Keep the gradients for later, so that a backward finds none; or drop those there are for the kept ones."""
        if aside == (self.gradients_aside is not None):
            return
        self.settle()
        if self.gradients_aside is None:
            found = {name: parameter.grad for name, parameter in self.parameters.items()}
            self.gradients_aside = {name: None if grad is None else _alias(grad) for name, grad in found.items()}
            gradients: dict[str, Tensor | None] = dict.fromkeys(self.parameters)
        else:
            gradients, self.gradients_aside = self.gradients_aside, None
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]


def _alias(gradient: Tensor) -> Tensor:
    """The same gradient as another tensor object, so that PyTorch sees a second owner and does not reuse the memory."""
    return gradient.detach()
