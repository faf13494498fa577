"""Which options are for which blocks."""

from __future__ import annotations

import torch
from torch import nn

from moreh_ap.parallelizer.compiling.chosen_blocks import blocks_of_requests, unwrapped
from moreh_ap.protocol.messages.compile_requests import CompileRequest


def model_and_blocks():
    model = nn.ModuleDict({name: nn.ModuleList(nn.Sequential(nn.Linear(1, 1)) for _ in range(2)) for name in "ab"})
    return model, [*model["a"], *model["b"]]


def test_without_requests_all_blocks_are_compiled_with_the_defaults():
    model, blocks = model_and_blocks()
    assert blocks_of_requests(model, blocks, ()) == [(CompileRequest(), blocks)]


def test_the_innermost_request_counts_and_others_are_left_out():
    model, blocks = model_and_blocks()
    outer, inner = CompileRequest("aot_eager"), CompileRequest(mode="max-autotune")
    assert blocks_of_requests(model, blocks, (("a", outer), ("a.1", inner))) == [
        (outer, [blocks[0]]),
        (inner, [blocks[1]]),
    ]
    assert blocks_of_requests(model, blocks, (("", outer), ("b", inner))) == [(outer, blocks[:2]), (inner, blocks[2:])]
    assert blocks_of_requests(model, blocks, (("a.0", outer), ("b.1", outer))) == [(outer, [blocks[0], blocks[3]])]


def test_a_block_that_only_wraps_what_was_compiled():
    model, _ = model_and_blocks()
    inner = model["a"][0]
    model["a"][0] = torch.compile(inner)
    request = CompileRequest()
    assert blocks_of_requests(model, list(model["a"]), (("a.0._orig_mod", request),)) == [(request, [model["a"][0]])]
    assert unwrapped(model["a"][0]) is inner
