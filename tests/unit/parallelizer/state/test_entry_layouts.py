"""Entries of an optimizer's state: laid out like their parameter, or complete with its shape by chance."""

from __future__ import annotations

import torch

from moreh_ap.parallelizer.state.entry_layouts import EntryLayouts


def test_a_shape_tells_unless_it_was_noted_that_it_does_not():
    layouts, shard, other = EntryLayouts(), torch.zeros(4, 4), torch.zeros(4, 4)
    average, product = torch.ones(4, 4), torch.ones(4, 4)
    assert layouts.is_laid_out(shard, "product", product)
    layouts.note(shard, {"product", "step"})
    assert layouts.is_laid_out(shard, "average", average) and not layouts.is_laid_out(shard, "product", product)
    assert layouts.is_laid_out(other, "product", product) and layouts.complete(shard) == {"product", "step"}
    layouts.note(shard, ())
    assert layouts.is_laid_out(shard, "product", product) and layouts.complete(shard) == set()


def test_numbers_and_other_shapes_are_not_laid_out():
    layouts, parameter = EntryLayouts(), torch.zeros(())
    assert not layouts.is_laid_out(parameter, "step", torch.zeros(()))
    assert not layouts.is_laid_out(parameter, "step", 1)
    assert not layouts.is_laid_out(torch.zeros(4), "rows", torch.zeros(2))
