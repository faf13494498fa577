"""The controller's side of a model on the workers.

The real `nn.Module` objects stay in the controller as a skeleton; their parameters and buffers are virtual tensors
whose values the workers keep. Before each call the few things a script may change on a skeleton (training mode, frozen
parameters, plain attributes, a transformers config, the set of modules) are compared with what the workers have.
"""

from __future__ import annotations

import operator
import pickle
import weakref
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.device.patches.compiling import compiled_in
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import UnsupportedError
from moreh_ap.plan import Plan
from moreh_ap.protocol.hook_records import IN_PLACE
from moreh_ap.protocol.memory_format import kernel_format
from moreh_ap.protocol.messages.models import (
    BuildModel,
    ChangeModule,
    ExampleCall,
    ReadObjects,
    ReleaseModel,
    SetKernelFormats,
    SetRequiresGrad,
)
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.protocol.model_settings import Settings
from moreh_ap.protocol.module_attributes import computed_by_hooks, full_name, namespace_of
from moreh_ap.protocol.passed_state import (
    PASSED_STATE,
    add_trained,
    buffers_with_graphs,
    keeps_tensors,
    trained_attributes,
)
from moreh_ap.protocol.skeleton import pickle_attribute, pickle_skeleton
from moreh_ap.session.models.container_attributes import Containers, SettingsObjects
from moreh_ap.session.models.first_example import example_of
from moreh_ap.session.models.global_changes import GlobalChanges, warn_of_writes
from moreh_ap.session.models.left_on_workers import LeftOnWorkers
from moreh_ap.session.models.object_attributes import ObjectAttributes
from moreh_ap.session.models.parameter_gradients import Gradients
from moreh_ap.session.models.script_hooks import ScriptHooks
from moreh_ap.session.models.signatures import Signatures
from moreh_ap.session.outbox import Posted
from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import ModelState, OnWorkers
from moreh_ap.session.value_files import ValueFiles
from moreh_ap.states import ModelPhase, SessionState, StateMachine

# For `map`: every step looks at all members and parameters, without a Python call for each.
_requires_grad_of = operator.attrgetter("requires_grad")
_values_of = operator.methodcaller("values")


class RemoteModel:
    """A model whose parameters and buffers are on the workers; the module tree stays in the controller.

    Args:
        session: The session of the workers.
        root: A module whose parameters and buffers are virtual tensors.
        call: Module, positional and keyword arguments of the first call; the stages of a pipeline depend on it.
        plan: The plan of the model.
        on_trial: Whether the plan is only tried: hooks of the script run in the workers alone.
        compiles_later: Whether blocks can be compiled once steps have run as written (`compiled_runs.py`).

    Raises:
        UnsupportedError: If the module cannot be sent (an attribute that cannot be pickled).
    """

    def __init__(
        self, session: Session, root: nn.Module, call: tuple[nn.Module, Any, Any], plan: Plan, on_trial: bool = False,
        compiles_later: bool = False,
    ) -> None:  # fmt: skip
        self.session, self.root, self._compiles_later = session, root, compiles_later
        self.owner = f"model{session.outbox.new_id()}"
        self.phase = StateMachine(ModelPhase.CURRENT)
        self._free = weakref.finalize(self, session.outbox.release, ReleaseModel(self.owner))
        self.settings = Settings()  # of attributes and frozen parameters: the structure of calls depends on them
        self._set_plan(plan)
        self.modules = list(root.modules())
        # Tied tensors occur once, under their first name.
        self.parameters: dict[str, VirtualTensor] = dict(root.named_parameters())  # type: ignore[arg-type]
        self.buffers: dict[str, VirtualTensor] = dict(root.named_buffers())  # type: ignore[arg-type]
        self.holder = ModelState(session, self)
        self.gradients = self.holder.gradients = Gradients(self.holder, self.owner, self.parameters)
        self.signatures, self.latest_call = Signatures(session.outbox, self.owner, computed_by_hooks(root)), 0
        self.open_graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # nodes through which a backward may still go
        # Autograd enters a remote call through this leaf: a call joins no parameter to the controller's graph.
        self.anchor = torch.zeros((), requires_grad=True)
        self.script_hooks = ScriptHooks(root, plan, on_trial, session.script_only_hooks)
        self.hook_keys = _hook_keys(self.modules)
        self._training, self._times_failed = self._training_flags(), session.outbox.times_failed
        self._requires_grad = [parameter.requires_grad for parameter in self.parameters.values()]
        self._kernels = {name: parameter for name, parameter in self.parameters.items() if parameter.ndim >= 4}
        self._kernel_strides = [torch.empty(kernel.shape, device="meta").stride() for kernel in self._kernels.values()]
        self._changes: list[tuple[str, str, Any]] = []
        self._containers, self._settings_objects = Containers(dict(root.named_modules())), SettingsObjects(root)
        self._members = _registered_members(self.modules)
        self._globals = GlobalChanges(root) or None
        if not on_trial:
            warn_of_writes(root)
        self.untold = LeftOnWorkers(type(root).__name__)
        self._passed_on, self._keeps_tensors = trained_attributes(root), keeps_tensors(root)
        self.passes_state, self._set_buffers = bool(self._passed_on), buffers_with_graphs(root)
        self._path_of = {id(module): path for path, module in root.named_modules()}
        self._objects = ObjectAttributes(root, self._path_of)
        self._built: Posted
        self._placements: dict[str, str] | None = None
        self.first_layout: Any = None  # `oom_recovery` keeps there what it needs until the first step
        self._first_call: tuple[nn.Module, Any, Any] | None = call
        self._build()
        self._take_gradients()
        forget = weakref.WeakMethod(self._forget_first_call)  # weak: the state outlives the model
        session.outbox.state.when_left(SessionState.REPLAYABLE, lambda: (forget() or _do_nothing)())

    def _set_plan(self, plan: Plan) -> None:
        self.plan = plan
        # With a pipeline or micro-batches a forward runs after its reply, which cannot contain its random states.
        self.runs_after_answer = plan.pipeline > 1 or plan.micro_batches > 1
        self.session.runs_after_answer |= self.runs_after_answer

    def example(self) -> ExampleCall | None:
        """Returns the first call as workers need it to cut the model into stages; None for a plan without a pipeline.

        Raises:
            PlanError: A submodule was called, not the model.
        """
        if self.plan.pipeline == 1 or self._first_call is None:
            return None
        return example_of(self.root, self._first_call)

    def _forget_first_call(self) -> None:
        self._first_call = None

    def laid_out_again(self, plan: Plan) -> None:
        """Resets the model before other workers build it under another plan."""
        self._set_plan(plan)
        self._placements = None
        self.signatures = Signatures(self.session.outbox, self.owner, computed_by_hooks(self.root))

    def attach(self) -> None:
        """Makes the model's tensors refer to the values on the workers."""
        own = {*map(id, self.parameters.values())}  # a buffer may be a parameter, too, until a hook replaces it
        buffers = ((name, one) for name, one in self.buffers.items() if id(one) not in own)
        on_workers = {name: tensor for name, tensor in buffers if name not in self._set_buffers}
        for kind, tensors in (("param", self.parameters), ("buffer", on_workers)):
            for name, tensor in tensors.items():
                tensor._cell.value = OnWorkers(self.holder, StateRef(self.owner, kind, name))

    def _build(self) -> None:
        files = ValueFiles()
        try:
            with self.script_hooks.replaced():
                skeleton = pickle_skeleton(self.root, lambda tensor: getattr(tensor, "_cell", None))
            sources = files.sources_of({**self.parameters, **self.buffers})
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            files.remove()
            raise UnsupportedError(
                f"{type(self.root).__name__} cannot be sent to the accelerator's workers: {error}.",
                allowed="Every attribute of a module must be picklable (no open files, locks or generators).",
                fix="del model.<attribute>  # before the first call",
            ) from error
        self.session.workers.provide(sorted({source.file for boxes in sources.values() for source in boxes}))
        before = [(tensor, tensor._cell.value) for tensor in (*self.parameters.values(), *self.buffers.values())]
        self.attach()
        session, outbox = self.session, self.session.outbox

        def built(reply: Posted) -> None:
            if reply.failed():  # nothing is lost: the controller still has the values, and the next call tries again
                for tensor, value in before:
                    tensor._cell.value = value
            else:
                before.clear()
            session.when_not_sent_again(files.remove)  # not `self.session`: the promise must not keep the model

        compiled = compiled_in(self.root) if self.plan.compile != "none" else ()
        made_of = skeleton, str(self.plan), sources, self.example(), compiled, self._compiles_later
        self._built = outbox.post(BuildModel(self.owner, *made_of))
        self._built.add_done_callback(built)
        outbox.flush()

    def _take_gradients(self) -> None:
        """Hands gradients that the controller's autograd has computed, and those it will compute, to the workers."""
        for name, parameter in self.parameters.items():
            gradient = parameter.hand_gradient_on()
            if gradient is not None:
                self.gradients.set(name, gradient)
            parameter.expect_gradients_here()

    def placement_of(self, name: str) -> str | None:
        """Returns how the shards of a parameter lie on the workers, see `OnWorkers.placement`; waits the first time."""
        if self.plan.tensor == self.plan.pipeline == 1:
            return None
        if self._placements is None:
            answers = self._built.result()
            self._placements = {name: place for answer in reversed(answers) for name, place in answer.items()}
        return self._placements.get(name)

    def promise_like(self, name: str) -> VirtualTensor:
        """Returns a new temporary on the workers, sharded like parameter `name`."""
        return self.holder.promise(self.parameters[name].detach(), self.placement_of(name))

    def path_of(self, module: nn.Module) -> str:
        """Returns the path of a submodule below the root."""
        return self._path_of[id(module)]

    def contains(self, module: nn.Module) -> bool:
        return id(module) in self._path_of

    def has_trainable_parameters(self) -> bool:
        return any(map(_requires_grad_of, self.parameters.values()))  # `_requires_grad` may be old

    # -- what a script may change between calls --------------------------------------------------------------------

    def note_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Records that a plain attribute of a submodule was set; the workers get it before the next call."""
        path = self._path_of[id(module)]
        self._containers.note(path, module, name, value)
        self._settings_objects.note(name, value)
        self._keeps_tensors |= any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        self.passes_state |= add_trained(self._passed_on, full_name(path, name), value)
        if not self.is_passed_on(full_name(path, name), value):
            self._changes.append((path, name, value))

    def send_changes(self) -> bytes | None:
        """Posts the changes since the last call; returns the training flags, if they changed, for the call itself."""
        objects = self._settings_objects
        if objects.has_some_of_script or any(map(operator.ne, objects.of_libraries, objects.were_of_libraries)):
            self._changes += objects.take_changes()
        if self._containers.known:
            for path, name, value in self._containers.take_changes():
                if not self.is_passed_on(full_name(path, name), value):
                    self._changes.append((path, name, value))
        if self._globals is not None:
            self._changes += self._globals.take()
        if self._objects.known:
            self._changes += self._objects.take_changes()
        if self._changes:
            changes = tuple((path, name, pickle_attribute(value, self._path_of)) for path, name, value in self._changes)
            self._changes = []
            self.settings.set({(path, name): pickled for path, name, pickled in changes})
            self.session.outbox.post(ChangeModule(self.owner, changes))
        with torch._C.DisableTorchFunction():  # the tensors' own attributes, not through the device
            requires_grad = [parameter.requires_grad for parameter in self.parameters.values()]
            strides = [kernel.stride() for kernel in self._kernels.values()]
        if requires_grad != self._requires_grad:
            pairs = zip(self.parameters, requires_grad, self._requires_grad)
            flags = {name: new for name, new, old in pairs if new != old}
            self.settings.set(flags)
            self.session.outbox.post(SetRequiresGrad(self.owner, flags))
            self._requires_grad = requires_grad
        if strides != self._kernel_strides:
            self._kernel_strides = strides
            formats = {name: kernel_format(kernel) for name, kernel in self._kernels.items()}
            self.settings.set({(name, "memory_format"): format for name, format in formats.items()})
            self.session.outbox.post(SetKernelFormats(self.owner, formats))
        training = self._training_flags()
        times_failed = self.session.outbox.times_failed  # what a skipped call brought along has not arrived
        if (training, times_failed) == (self._training, self._times_failed):
            return None
        self._training, self._times_failed = training, times_failed
        return training

    @property
    def training_flags(self) -> bytes:
        """One byte for each submodule, in the order of ``root.modules()``."""
        return self._training

    def _training_flags(self) -> bytes:
        return bytes([module.training for module in self.modules])

    def take_attributes(self, attributes: dict[str, Any]) -> None:
        """Sets attributes of submodules in the controller as a forward has set them on the workers."""
        for key, value in attributes.items():
            name = key.removesuffix(IN_PLACE)
            path, _, last = name.rpartition(".")
            submodule = self.root.get_submodule(path)
            if last in submodule._buffers:
                self._set_buffers.add(name)
            self._containers.set(path, submodule, last, value, in_place=key != name)
            self._settings_objects.note(last, value)

    def may_be_called_again(self) -> bool:
        """Returns whether a call may have to be repeated: with a hook run in the controller, or with passed state."""
        return self.script_hooks.any or self.signatures.passes_more or self._keeps_tensors

    def pass_on(self, path: str, names: tuple[str, ...]) -> None:
        """Records attributes that forwards of the submodule at `path` read; every call passes them from now on."""
        self._passed_on.setdefault(path, set()).update(names)
        self.passes_state = True

    def passed_state(self, path: str) -> dict[str, Any]:
        """Returns the passed state for a call of the submodule at `path`."""
        kept = {}
        for name in sorted(self._passed_on.get(path, ())):
            path, _, last = name.rpartition(".")
            value = namespace_of(self.root.get_submodule(path), last).get(last)
            if self.is_passed_on(name, value):
                kept[name] = value
        return {PASSED_STATE: kept} if kept else {}

    def is_passed_on(self, name: str, value: Any) -> bool:
        """Returns whether calls pass the value of an attribute, by its path and name."""
        is_read = any(name in names for names in self._passed_on.values())
        return is_read and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))

    def note_replayed(self) -> None:
        """Records that hooks have changed containers of submodules in the controller as on the workers."""
        self._containers.take_changes()
        self._settings_objects.take_changes()

    def tell_untold(self) -> None:
        """Has the script find what forwards have set on the workers only, or warns of it."""

        def copied(names: list[str]) -> set[str]:
            return self._objects.put(list(self.session.outbox.submit(ReadObjects(self.owner, tuple(names))).result()))

        self.untold.tell(self.script_hooks.attributes, copied, silently=self.script_hooks.is_silent)

    def note_structure(self) -> None:
        """Records that a submodule or parameter was added or replaced; the next call rebuilds the model."""
        self.phase.enter(ModelPhase.OUTDATED, only_from=ModelPhase.CURRENT)

    def is_current(self) -> bool:
        """Returns whether the workers have the module tree and its parameters are still on the workers."""
        return self.keeps(next(iter(self.parameters.values()))) and not self.is_out_of_date()

    def is_out_of_date(self) -> bool:
        """Returns whether the module tree, or the hooks on it, differ from those on the workers."""
        if self.phase.current is not ModelPhase.CURRENT:
            return True
        # Not recorded: `functional_call` puts other members there for one call.
        return _hook_keys(self.modules) != self.hook_keys or self._has_other_members()

    def _has_other_members(self) -> bool:
        members = _registered_members(self.modules)
        if len(members) == len(self._members) and not any(map(operator.is_not, members, self._members)):
            return False
        names = self._set_buffers | self.script_hooks.buffers
        known = {id(buffer) for name, buffer in self.root.named_buffers() if name in names}
        pairs = zip(members, self._members)
        return len(members) != len(self._members) or any(now is not was and id(now) not in known for now, was in pairs)

    # -- leaving ---------------------------------------------------------------------------------------------------

    def has_left(self) -> bool:
        """Returns whether the workers keep none of the module's parameters and buffers; `to` makes other buffers."""
        return not any(map(self.keeps, chain(self.parameters.values(), *(m._buffers.values() for m in self.modules))))

    def lost_tensors(self) -> list[Tensor]:
        """Returns parameters and buffers that are elsewhere, at another model or in this process, and may change."""
        passed = self._set_buffers | self.script_hooks.buffers
        own = chain(self.parameters.items(), self.buffers.items())
        return [tensor for name, tensor in own if name not in passed and not self.keeps(tensor)]

    def keeps(self, tensor: Tensor | None) -> bool:
        """Returns whether `tensor` is a parameter or buffer that this model's workers keep."""
        return isinstance(tensor, VirtualTensor) and getattr(tensor._cell.value, "owner", None) is self.holder

    def release(self) -> None:
        """Has the workers free the model, as they do when the script has dropped it."""
        self.phase.enter(ModelPhase.RELEASED)
        self._free()

    def is_released(self) -> bool:
        return self.phase.current is ModelPhase.RELEASED


def _do_nothing() -> None:
    """In place of a method whose object is gone."""


def _hook_keys(modules: list[nn.Module]) -> list[tuple[int, ...]]:
    """Returns the keys of all hooks of the modules, to notice a change."""
    tables = [
        (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
        for module in modules
    ]
    if not any(chain.from_iterable(tables)):
        return []
    return [(number, *chain.from_iterable(hooks)) for number, hooks in enumerate(tables) if any(hooks)]


def _registered_members(modules: list[nn.Module]) -> list[nn.Module | Tensor | None]:
    """Returns all registered submodules, parameters and buffers: ``layers.insert(0, layer)`` sets no attribute."""
    registries = [(module._modules, module._parameters, module._buffers) for module in modules]
    return list(chain.from_iterable(map(_values_of, chain.from_iterable(registries))))
