"""Who computes the loss of a language model, the forward or the script, and whether logits leave the forward.

Decides from a first call, before the script has computed anything of its result. Must not know plans.

[Note: before there is a loss]
A plan is chosen at the first call, and whether a script takes a loss from its logits shows after it. transformers'
models take the loss if they are given labels. Of any other model with a vocabulary the call is run without values
(`layer_sizes.py`): a result that has logits and no single number leaves the loss to the script. Where that is not
known, and outside of training, the forward is thought to compute it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.planner.profiles.model_profile import ModelProfile
from moreh_ap.session.planning.layer_sizes import result_without_values

LEAST_CLASSES = 2**13
"""Logits of a token from which on it matters, as for `TrainingSystem.chunked_classes`."""


def with_loss_place(
    profile: ModelProfile, root: nn.Module, call: tuple[nn.Module, Any, Any], *, takes_labels: bool
) -> ModelProfile:
    """Returns the profile with where the first call computes the loss. See [Note: before there is a loss].

    Args:
        profile: What the model costs.
        root: The model.
        call: Module, positional and keyword arguments of the first call.
        takes_labels: Whether it is a decoder of transformers with its head, which computes the loss of its labels.
    """
    module, args, kwargs = call
    if profile.logits_per_token < LEAST_CLASSES or not torch.is_grad_enabled() or not module.training:
        return profile
    if takes_labels:
        return replace(profile, loss_outside=kwargs.get("labels") is None)
    result = result_without_values(root, module, tuple(args), dict(kwargs))
    if result is NotImplemented:
        return profile
    numbers = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    has_logits = any(leaf.ndim > 1 and leaf.shape[-1] == profile.logits_per_token for leaf in numbers)
    has_loss = any(leaf.ndim == 0 for leaf in numbers)
    return replace(profile, loss_outside=has_logits and not has_loss, logits_returned=has_logits or not has_loss)
