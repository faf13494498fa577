"""Values that tests have arrive when they say so."""

from __future__ import annotations

from torch import Tensor

from moreh_ap.device.tensor import ACCELERATOR, VirtualTensor
from moreh_ap.device.values import Cell, Value


class Promised(Value):
    """A value that arrives when the test says so; reading it earlier is an error."""

    __slots__ = ("arrived", "is_order_known", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.arrived, self.is_order_known = tensor, False, lambda: True

    def ready(self) -> bool:
        return self.arrived

    def read(self) -> Tensor:
        if not self.arrived:
            raise AssertionError("the script waited for a value it did not ask for")
        return self.tensor


def promise(tensor: Tensor) -> tuple[Promised, VirtualTensor]:
    value = Promised(tensor)
    return value, VirtualTensor(Cell(value, ACCELERATOR), tensor)
