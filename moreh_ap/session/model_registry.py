"""Decides which calls run on the workers: those of the outermost module with parameters on the accelerator."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from moreh_ap.device.host_tensors import HOST
from moreh_ap.device.patches.shared_parameters import take_apart
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.torchscript import refuse_compiled
from moreh_ap.local import garbage_at_start
from moreh_ap.local.identity_tables import IdentityTable
from moreh_ap.plan import Plan
from moreh_ap.protocol.blocks import ModelGroup
from moreh_ap.protocol.messages.stream import ImportModules
from moreh_ap.protocol.module_attributes import full_name
from moreh_ap.protocol.script_code.import_path import ImportPath
from moreh_ap.protocol.script_code.script_environment import ScriptEnvironment
from moreh_ap.session.calls.remote_call import call_on_route
from moreh_ap.session.models.remote_model import RemoteModel
from moreh_ap.session.models.script_hooks import replaying
from moreh_ap.session.models.training_forwards import (
    draws_for_pyro,
    follow_from_each_other,
    may_differentiate_arguments,
    runs_in_script,
)
from moreh_ap.session.own_process.faster_place import StepTrial
from moreh_ap.session.own_process.small_models import SmallModels
from moreh_ap.session.planning import first_call
from moreh_ap.session.planning.autotune import tune
from moreh_ap.session.planning.compiled_runs import watch_to_try
from moreh_ap.session.planning.oom_recovery import Recovery
from moreh_ap.session.planning.step_watch import Watch
from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import ModelState, OnWorkers, StateHolder, bring_here, leave_other_models
from moreh_ap.states import ModelPhase, SessionState

Route = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Calls a module with positional and keyword arguments; NotImplemented if it has changed."""


class ModelRegistry:
    """Finds the remote model that a module belongs to, and makes it at the first call."""

    def __init__(self, session: Session) -> None:
        #: Routes to modules on the workers: results of `find`, until the script moves or adds modules.
        self.routes: IdentityTable[nn.Module, Route] = IdentityTable()
        self._session = session
        self._recovery = Recovery(session)
        self._small = SmallModels(session, self.routes)
        # Weak: a model goes with its module, as on one device.
        self._models: weakref.WeakSet[RemoteModel] = weakref.WeakSet()
        self._announced: set[str] = set()
        self._environment, self._import_path = ScriptEnvironment(), ImportPath()
        self._arguments: list[str] = []  # `sys.argv`, as the workers know it
        self._run_here: IdentityTable[nn.Module, bool | None] = IdentityTable()  # see `_runs_here`
        self._calling_here = threading.local()  # whether this thread is in `call_here`
        # Of models that have left the workers to be timed in this process.
        self._plans: IdentityTable[nn.Module, Plan] = IdentityTable()
        # A module that was moved at once (``model.cuda()``) is one model even if a submodule is called first.
        self._root_of: IdentityTable[nn.Module, weakref.ref[nn.Module]] = IdentityTable()
        # By which a backward reaches calls of a module, also those from before it was laid out anew, to refuse them.
        self._anchors: IdentityTable[nn.Module, torch.Tensor] = IdentityTable()

    def note_moved(self, root: nn.Module) -> None:
        """Records that the script moved `root`: it is one model, or none if it left the accelerator."""
        if _is_on_accelerator(root):
            for module in root.modules():
                self._root_of[module] = weakref.ref(root)
            self._announce(root)
        self._release_those_that_left()

    def _release_those_that_left(self) -> None:
        self.routes.clear()
        for model in [model for model in self._models if model.has_left()]:
            self._models.discard(model)
            bring_here(self._session, filter(model.keeps, model.buffers.values()))  # the script may keep them
            model.release()
        for model in self._models:
            lost = model.lost_tensors()
            if any(tensor.requires_grad for tensor in lost):
                model.phase.enter(ModelPhase.DIVIDED)
            elif lost:
                model.note_structure()

    def _announce(self, root: nn.Module) -> None:
        """Has the workers import the model's modules while the script prepares its data, with its environment and
        arguments."""
        names = {type(module).__module__ for module in root.modules()} - {"__main__"}
        news = tuple(sorted(name for name in names - self._announced if not name.startswith("torch.")))
        environment, folders = self._environment.news(), self._import_path.news()
        arguments = () if sys.argv == self._arguments else tuple(sys.argv)
        if news or environment or folders or arguments:
            self._announced.update(news)
            self._arguments = list(sys.argv)
            self._session.outbox.submit(ImportModules(news, environment, folders, arguments))

    def any(self) -> bool:
        """Returns whether a model is on the workers."""
        return bool(self._models)

    def note_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Tells the model of `module`, if any, that an attribute was set."""
        for model in self._models:
            if not model.contains(module):
                continue
            if replaying():
                hooks = model.script_hooks
                found = hooks.buffers if name in module._buffers else hooks.attributes
                found.add(f"{model.path_of(module)}.{name}".lstrip("."))
            elif isinstance(value, (nn.Module, nn.Parameter)) or (
                name in module._buffers and not model.is_passed_on(full_name(model.path_of(module), name), value)
            ):
                model.note_structure()
            else:
                model.note_attribute(module, name, value)

    def note_structure(self, module: nn.Module) -> None:
        """Has the model of `module`, if any, be laid out again: it is compiled, or has lost an attribute."""
        for model in self._models:
            if model.contains(module):
                model.note_structure()

    def find(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[RemoteModel, str] | None:
        """Returns the remote model for a call of `module` and the path in it; None if the controller runs the call."""
        if getattr(self._calling_here, "active", False):
            return None
        parameter = next(iter(module.parameters()), None)
        if not isinstance(parameter, VirtualTensor) or not parameter.is_cuda:
            return None
        if self._runs_here(module, args, kwargs):
            return None
        value = parameter._cell.value
        if isinstance(value, OnWorkers) and isinstance(value.owner, ModelState):
            model = value.owner.live_model()
            if not model.is_out_of_date() and model.contains(module):
                if self._small.places.is_due(model.root) and self._are_tried_here():
                    return None
                garbage_at_start.include_older_objects()
                path, is_due = model.path_of(module), self._small.places.is_due(model.root)
                is_sure = self._run_here[module] is not None and not is_due
                if is_sure and not model.script_hooks.any:  # a call with hooks may have to be repeated
                    self.routes[module] = functools.partial(call_on_route, weakref.ref(model), path)
                return model, path
            return self._build(module if not model.contains(module) else model.root, module, args, kwargs)
        return self._build(self._moved_root(module), module, args, kwargs)

    def _runs_here(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Returns whether a call of a module runs in the script, for what its forward's code does."""
        if module not in self._run_here:
            self._run_here[module] = runs_in_script(module) or (None if may_differentiate_arguments(module) else False)
        known = self._run_here[module]
        return follow_from_each_other((args, kwargs)) if known is None else known

    def call_here(self, model: RemoteModel, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a call that adds members to a model, on the script's own modules and operation by
        operation; the next call lays out the model with them."""
        self._bring_back(model.root)
        self._calling_here.active = True
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            self._calling_here.active = False

    def _are_tried_here(self) -> bool:
        """Returns whether the models that are due have left the workers, since steps are timed in this process next."""
        places = self._small.places
        models = [model for model in self._models if places.is_due(model.root)]
        if any(model.open_graphs for model in models):
            places.put_off()
            return False
        trial = places.take_due()
        if any(model.script_hooks.any for model in models):
            return False
        self._free_dropped()
        for model in models:
            self._plans[model.root] = model.plan
            self._bring_back(model.root)
        self._small.try_here([model.root for model in models], trial)
        HOST.holds_all = not self._models
        return True

    def _free_dropped(self) -> None:
        """Frees models that the script has dropped: they are reference cycles."""
        if self._models:
            gc.collect()

    def _moved_root(self, module: nn.Module) -> nn.Module:
        reference = self._root_of.get(module)
        root = reference() if reference is not None else None
        return root if root is not None and any(submodule is module for submodule in root.modules()) else module

    def _build(self, root: nn.Module, module: nn.Module, args: Any, kwargs: Any) -> tuple[RemoteModel, str] | None:
        if any(parameter.grad_fn is not None for parameter in root.parameters()):
            return None  # the script computed the parameter (`functional_call`): it is in the controller's graph
        if not _is_on_accelerator(root):
            root = module
        if not _is_on_accelerator(root):
            return None  # parameters on both sides: it runs here, its submodules on the accelerator do not
        root = self._with_all_that_share(root)
        for lost in {owner.session for owner in _owners(root)} - {self._session}:
            lost.synchronize()  # raises the error in which it has ended
        leave_other_models(_state_tensors(root))
        refuse_compiled(root)
        first_call.refuse_nested((module, args, kwargs))
        if self._session.trial_plan is None:
            first_call.tell_watcher(root, (module, args, kwargs))
        if self._session.trial_plan is None and self._small.take(root, (args, kwargs)):
            HOST.holds_all = not self._models
            garbage_at_start.include_older_objects()
            return None
        if draws_for_pyro(module):
            return None
        HOST.holds_all = False
        self._small.let_go(root)
        self._bring_back(root)
        self._free_dropped()
        model = self._lay_out(root, (module, args, kwargs))
        model.anchor = self._anchors.setdefault(root, model.anchor)
        self._models.add(model)
        self._session.job.has_model(type(root).__name__, str(model.plan))
        return model, model.path_of(module)

    def _with_all_that_share(self, root: nn.Module) -> nn.Module:
        """Returns the module, or one around all that share its parameters, whose gradients add up, or its buffers."""
        roots = [reference() for reference in self._root_of.values()] + [model.root for model in self._models]
        others = list({id(other): other for other in roots if other is not None and _is_on_accelerator(other)}.values())
        group, own = [root], _ids(root)
        while sharing := [other for other in others if other not in group and not own.isdisjoint(_ids(other))]:
            group += sharing
            own.update(*map(_ids, sharing))
        inside = {id(submodule) for module in group for submodule in module.modules() if submodule is not module}
        outermost = [module for module in group if id(module) not in inside]
        return outermost[0] if len(outermost) == 1 else ModelGroup(outermost)

    def _lay_out(self, root: nn.Module, call: tuple[nn.Module, Any, Any]) -> RemoteModel:
        session = self._session
        take_apart(root)
        for module in root.modules():
            if isinstance(module, nn.RNNBase):
                module._update_flat_weights()  # it may list those of a `functional_call`, which are not its own
        self._announce(root)  # a library may have put its parameters on the accelerator itself, without a move
        if session.trial_plan is not None:
            return RemoteModel(session, root, call, session.trial_plan, on_trial=True)
        plan = self._plans.pop(root, None)
        if plan is not None:  # it was on the workers before
            return RemoteModel(session, root, call, plan)
        planned = first_call.plan_first_call(session, root, call)
        values = [(tensor, tensor._cell.value) for tensor in _state_tensors(root)]
        if session.options.autotune and not planned.is_given:
            planned = tune(session, root, call, planned)
        if session.outbox.state.current is SessionState.EMPTY:
            session.keep_commands()
        if not self._models:
            session.outbox.journal.open()
        model = RemoteModel(session, root, call, planned.plan, compiles_later=planned.tries_compiled)
        self._recovery.take_on(model, planned, values)
        self._small.places.note_layout(root, call[1:])
        if not isinstance(session.watch, StepTrial):
            watched = functools.partial(self._watched, session.outbox.new_id())
            if planned.tries_compiled:
                session.watch = watch_to_try(session, model.owner, planned.expected, watched)
            else:
                session.watch = Watch(session.outbox, planned.expected, watched)
        return model

    def _watched(self, since: int, optimizer: Optimizer, step_s: float | None) -> None:
        """Called when the first steps of a model on the workers are over.

        Args:
            since: Models whose calls all have smaller ids take no part in a step.
            optimizer: One whose steps were counted.
            step_s: Seconds from one of them to the next; None if workers failed.
        """
        self._session.stop_watching()
        if step_s is not None:
            roots = [model.root for model in self._models if model.latest_call > since]
            self._small.places.measured_on_workers(roots, optimizer, step_s)
            self.routes.clear()  # the next call asks `find`

    def _bring_back(self, root: nn.Module) -> None:
        """Reads the values of `root` back from the workers: its structure changed, or its calls run here next."""
        tensors = [tensor for tensor in _state_tensors(root) if isinstance(tensor._cell.value, OnWorkers)]
        gradients = [None if tensor.grad is None else tensor.grad.cpu() for tensor in tensors]
        bring_here(self._session, tensors)
        for tensor, gradient in zip(tensors, gradients):
            tensor.grad = None if gradient is None else gradient.cuda()
        self._release_those_that_left()


def _ids(module: nn.Module) -> set[int]:
    return set(map(id, _state_tensors(module)))


def _state_tensors(module: nn.Module) -> list[Any]:
    return [*module.parameters(), *module.buffers()]


def _owners(module: nn.Module) -> list[StateHolder]:
    """Returns the owners of the tensors that workers keep."""
    values = [tensor._cell.value for tensor in _state_tensors(module) if isinstance(tensor, VirtualTensor)]
    return [value.owner for value in values if isinstance(value, OnWorkers)]


def _is_on_accelerator(module: nn.Module) -> bool:
    tensors = _state_tensors(module)
    return bool(tensors) and all(isinstance(tensor, VirtualTensor) and tensor.is_cuda for tensor in tensors)
