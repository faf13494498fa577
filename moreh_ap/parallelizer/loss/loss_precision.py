"""Losses of a forward that a plan has compute in bfloat16: their operands are float32, as under `torch.autocast`.

Decides which functions of a forward are raised to float32. Must not know plans, batches, or how a loss is computed.

[Note: losses are float32]
A model that computes in bfloat16 gives its loss bfloat16 operands. PyTorch's losses return what they are given, so a
loss of 6.41 would be 6.4375: of 24 binary digits 8 are left, and of the gradients of its mean as few. Under
`torch.autocast` losses and log-probabilities are float32 whatever they are given. So they are here. Other functions of
autocast's list (softmax, norms, powers) stay as they are: layers behind them have weights in bfloat16, and would
refuse float32. Source: https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from moreh_ap.parallelizer.loss.mean_functions import LOSSES

_LOG_PROBABILITIES = {F.log_softmax, torch.log_softmax, Tensor.log_softmax}
RAISED = (LOSSES | _LOG_PROBABILITIES) - {F.ctc_loss}
"""Functions that compute in float32. `ctc_loss` has log-probabilities for its operand."""

_LOW_PRECISION = (torch.bfloat16, torch.float16)


class Float32Losses(TorchFunctionMode):
    """While active, losses and log-probabilities of tensors in bfloat16 are float32. See [Note: losses are float32]."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in RAISED:
            return func(*args, **kwargs)
        if func is F.cross_entropy:  # which takes many logits in chunks then, without a float32 copy of all
            logits = args[0] if args else kwargs["input"]
            with torch.autocast(logits.device.type, dtype=torch.bfloat16):
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, _raised, (args, kwargs))
        return func(*args, **kwargs)


def _raised(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOW_PRECISION else tensor
