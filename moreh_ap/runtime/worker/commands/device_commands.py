"""Commands about a worker's device: what it is, how fast it computes, how long steps took, how much memory is used."""

from __future__ import annotations

from moreh_ap.protocol.messages.devices import (
    DescribeDevice,
    DeviceRates,
    ProbeDevice,
    ReportMemory,
    ReportSteps,
    StepReport,
)
from moreh_ap.protocol.messages.stream import Synchronize
from moreh_ap.runtime.worker import device_probe
from moreh_ap.runtime.worker.commands.tables import Handlers, Tables


class DeviceCommands:
    """Executes them."""

    def __init__(self, tables: Tables) -> None:
        self._device, self._clock = tables.device, tables.clock

    def handlers(self) -> Handlers:
        """Returns what executes each command."""
        return {
            DescribeDevice: lambda command: self._device.describe(),
            ProbeDevice: self._probe,
            ReportSteps: lambda command: StepReport(self._clock.seconds(), self._device.peak_reserved_bytes()),
            ReportMemory: self._device.memory,
            Synchronize: lambda command: self._device.synchronize(),
        }

    def _probe(self, command: ProbeDevice) -> DeviceRates:
        rates = device_probe.measure(self._device.torch_device, command.bf16, command.per_host)
        self._device.give_back(is_start=True)
        return rates
