"""Commands that build, change and forget models."""

from __future__ import annotations

import gc

from moreh_ap.parallelizer.compiling.compiled_blocks import use_compiled_blocks
from moreh_ap.protocol.messages.models import (
    BuildModel,
    ChangeModule,
    DescribeGradients,
    ModuleSum,
    ReadModuleSums,
    ReadObjects,
    RecordModules,
    ReleaseModel,
    SetKernelFormats,
    SetRequiresGrad,
    UseCompiledBlocks,
)
from moreh_ap.runtime.worker.call_preparation import CallPreparation
from moreh_ap.runtime.worker.commands.module_sums import ModuleSums
from moreh_ap.runtime.worker.commands.tables import Handlers, Tables
from moreh_ap.runtime.worker.worker_model import WorkerModel


class ModelCommands:
    """Executes them."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._models = tables.models
        self._recording = tables.recording

    def handlers(self) -> Handlers:
        """Returns what executes each command."""
        return {
            BuildModel: self._build,
            ReleaseModel: self._release,
            RecordModules: self._record,
            ReadModuleSums: self._sums,
            ChangeModule: lambda command: self._models[command.owner].change(command.changes),
            DescribeGradients: lambda command: self._models[command.owner].which_gradients(),
            ReadObjects: lambda command: self._models[command.owner].pickled_objects(command.names),
            SetRequiresGrad: lambda command: self._models[command.owner].set_requires_grad(command.requires_grad),
            UseCompiledBlocks: self._use_compiled_blocks,
            SetKernelFormats: lambda command: self._models[command.owner].set_kernel_formats(command.formats),
        }

    def _build(self, command: BuildModel) -> dict[str, str]:
        self._forget(command.owner)  # where it is laid out again
        self._models[command.owner] = model = WorkerModel(command, self._tables.device)
        self._tables.preparations[command.owner] = CallPreparation(model)
        self._tables.clock.restart()
        return model.placements()

    def _use_compiled_blocks(self, command: UseCompiledBlocks) -> None:
        model = self._models.get(command.owner)
        if model is not None:  # else the script has dropped it
            use_compiled_blocks(model.module, command.is_on)
            self._tables.clock.restart()

    def _record(self, command: RecordModules) -> None:
        self._recording[command.owner] = ModuleSums(self._models[command.owner].module)

    def _sums(self, command: ReadModuleSums) -> tuple[ModuleSum, ...]:
        return self._recording.pop(command.owner).close()

    def _release(self, command: ReleaseModel) -> None:
        self._forget(command.owner)
        gc.collect()

    def _forget(self, owner: str) -> None:
        self._models.pop(owner, None)
        self._tables.preparations.pop(owner, None)
