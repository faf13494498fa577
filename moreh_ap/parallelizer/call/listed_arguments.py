"""Lists with an entry for each row among the arguments of a forward. See [Note: listed rows] in `listed_rows.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from moreh_ap.parallelizer.call.extension import CallExtension, Findings, Forward
from moreh_ap.protocol.objects.listed_rows import put_back


class ListedArguments(CallExtension):
    """Gives a forward the lists that travelled as tensors, with the entries of the rows that it computes."""

    def around_forward(self, findings: Findings, module: nn.Module, forward: Forward) -> Forward:
        """Returns a forward that takes the entries under one more keyword."""

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            with torch._C.DisableTorchFunction():  # nothing that observes the forward has to know of this
                args, kwargs = put_back(args, kwargs)
            return forward(args, kwargs)

        return run
