"""Finds the ends of a model that know its vocabulary: embeddings and heads.

Decides which layers have a row for every token of the vocabulary. Must not know ranks, or how anything is split.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def find_vocabulary(module: nn.Module, blocks: list[nn.Module]) -> tuple[list[nn.Embedding], list[nn.Linear]]:
    """Returns the embeddings and heads of the vocabulary: outside blocks, of one size, both there or known to be so."""
    inside = {id(sub) for block in blocks for sub in block.modules()}
    outside = [sub for sub in module.modules() if id(sub) not in inside]
    known = [_given(module, "get_input_embeddings")]
    embeddings = [e for e in outside if isinstance(e, nn.Embedding) and (type(e) is nn.Embedding or e in known)]
    linears = [layer for layer in outside if type(layer) is nn.Linear]
    heads = [
        head
        for head in linears
        if any(_matches(head, e) for e in embeddings if e in known or known == [None])
        and (head is _given(module, "get_output_embeddings") or known == [None] or _is_tied(head, embeddings))
    ]
    found = [e for e in embeddings if e in known or (known == [None] and any(_matches(head, e) for head in heads))]
    for embedding in embeddings:
        if embedding not in found and any(embedding.weight is other.weight for other in (*found, *heads)):
            found.append(embedding)
    return [e for e in found if e.max_norm is None and not e.sparse], heads


def _given(module: nn.Module, getter: str) -> Any:
    """Returns what a transformers model says about itself, None where it says nothing."""
    if not hasattr(module, getter):
        return None
    try:
        return getattr(module, getter)()
    except (NotImplementedError, AttributeError):  # transformers' way of saying that there is none
        return None


def _matches(head: nn.Linear, embedding: nn.Embedding) -> bool:
    return tuple(head.weight.shape) == tuple(embedding.weight.shape)


def _is_tied(head: nn.Linear, embeddings: list[nn.Embedding]) -> bool:
    return any(head.weight is embedding.weight for embedding in embeddings)
