"""`torch.autocast("cuda")` for the script's computations outside of models, on the controller's CPU.

Decides the precision of an operation on accelerator tensors in the controller. Modules on workers have their own
autocast.

[Note: two lists]
On CUDA autocast lowers the precision of matrix products and convolutions, and raises that of sensitive operations. The
CPU list lowers the same operations but raises fewer, so operations that CUDA raises are raised here first.
Source: https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from moreh_ap.device.tensor import VirtualTensor

_RAISED_NAMES = [
    "__pow__",
    "__rdiv__",
    "__rpow__",
    "__rtruediv__",
    "acos",
    "asin",
    "binary_cross_entropy_with_logits",
    "cosh",
    "cosine_embedding_loss",
    "cdist",
    "cosine_similarity",
    "cross_entropy",
    "cumprod",
    "cumsum",
    "dist",
    "erfinv",
    "exp",
    "expm1",
    "group_norm",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "log",
    "log10",
    "log_softmax",
    "log1p",
    "log2",
    "margin_ranking_loss",
    "mse_loss",
    "multilabel_margin_loss",
    "multi_margin_loss",
    "nll_loss",
    "norm",
    "normalize",
    "pdist",
    "poisson_nll_loss",
    "pow",
    "prod",
    "reciprocal",
    "rsqrt",
    "sinh",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax",
    "softmin",
    "softplus",
    "sum",
    "renorm",
    "tan",
    "triplet_margin_loss",
]
_RAISED = {getattr(holder, name) for holder in (torch, Tensor, F) for name in _RAISED_NAMES if hasattr(holder, name)}
_LOWER = (torch.float16, torch.bfloat16)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls `func` as it would run on a CUDA device; the script's autocast for "cuda" is on."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, VirtualTensor)]
    return run_on_device(func, args, kwargs) if any(tensor.is_cuda for tensor in tensors) else func(*args, **kwargs)


def run_on_device(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls `func`, an argument of which is on the accelerator; its tensors may be ordinary ones."""
    if func in _RAISED and kwargs.get("dtype") is None:
        args, kwargs = tree_map_only(Tensor, _raise, (args, kwargs))
        return func(*args, **kwargs)
    with torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda")):
        return func(*args, **kwargs)


def _raise(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOWER else tensor
