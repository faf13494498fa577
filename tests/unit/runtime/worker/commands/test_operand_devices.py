"""Operands of one operation on two devices; "meta" stands for a GPU."""

from __future__ import annotations

import torch

from moreh_ap.runtime.worker.commands.operand_devices import on_one_device

ATEN = torch.ops.aten
HOST, DEVICE, NUMBER = torch.ones(3), torch.ones(3, device="meta"), torch.tensor(2.0)


def devices(func, *args, **kwargs):
    args, kwargs = on_one_device(func, args, kwargs)
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return [leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)]


def test_operands_that_agree_stay():
    assert on_one_device(ATEN.mul.Tensor, (HOST, NUMBER), {})[0][0] is HOST
    assert on_one_device(ATEN.mul.Tensor, (DEVICE, DEVICE), {})[0][0] is DEVICE


def test_what_is_written_decides_and_is_not_copied():
    args, _ = on_one_device(ATEN.lerp_.Tensor, (HOST.clone(), HOST, HOST), {})
    assert [one.device.type for one in args] == ["cpu"] * 3
    args, kwargs = on_one_device(ATEN.addcmul_.default, (DEVICE, HOST, HOST), {"value": 2})
    assert args[0] is DEVICE and kwargs == {"value": 2}
    assert devices(ATEN.addcmul_.default, DEVICE, HOST, HOST, value=2) == ["meta"] * 3
    assert devices(ATEN.add.out, HOST, HOST, out=DEVICE) == ["meta"] * 3


def test_lists_that_are_written_on_several_devices_stay_pair_by_pair():
    pairs = ([HOST, DEVICE], [HOST, DEVICE])
    assert devices(ATEN._foreach_add_.List, *pairs) == ["cpu", "meta", "cpu", "meta"]
    assert devices(ATEN._foreach_add_.List, [DEVICE, DEVICE], [HOST, DEVICE]) == ["meta"] * 4


def test_numbers_in_host_memory_go_with_every_device():
    assert devices(ATEN.mul_.Tensor, DEVICE, NUMBER) == ["meta", "cpu"]
