"""Recurrent layers whose weights FSDP2 gathers.

Decides that their weights stay separate tensors. Must not know which units they are gathered in.

[Note: recurrent layers]
On a GPU a recurrent layer whose weights are other tensors than at its last call moves them into one piece of memory
(`flatten_parameters`). What FSDP2 has gathered would point there from then on, and FSDP2 gathers the weights of the
next step into the memory that it knows: the layer would compute with the weights of its first step for ever. So layers
leave weights where they are, and cuDNN copies them.

[Note: what a forward knows]
Models of transformers ask whether FSDP manages them, and if so compute layers that LayerDrop leaves out: devices might
draw other numbers. Workers draw the same ones, and the model is the one of one device. So modules do not say that they
are managed, except to the compiler of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from moreh_ap.parallelizer.precision.computing_copies import allow_weights_apart


def keep_weights_apart(roots: Sequence[nn.Module]) -> None:
    """Has recurrent layers leave their weights where they are. See [Note: recurrent layers]."""
    for layer in (layer for root in roots for layer in root.modules() if isinstance(layer, nn.RNNBase)):
        object.__setattr__(layer, "flatten_parameters", _leave_apart)
        allow_weights_apart()


def _leave_apart() -> None:
    """Leaves the weights of a recurrent layer where they are."""
