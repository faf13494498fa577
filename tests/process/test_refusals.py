"""What scripts for several processes have, and what else is refused: each explained at the script's line."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from user_script import UserScript

from moreh_ap.errors import UnsupportedError

LEFT_IN_THE_SCRIPT = """
import torch
from torch import nn
torch.moreh.option.enable_advanced_parallelization(devices=2)
model = nn.Linear(4, 4).cuda()
{line}
"""


@pytest.fixture(autouse=True)
def session(accelerator):
    return accelerator("replicate=2")


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).cuda()


def four_lines(error: pytest.ExceptionInfo[UnsupportedError]) -> bool:
    lines = str(error.value).splitlines()
    return [line.split(":")[0] for line in lines[1:]] == ["Allowed", "Try", "See"]


def test_wrappers_for_several_devices(model):
    with pytest.raises(UnsupportedError, match="DistributedDataParallel around a Sequential") as error:
        nn.parallel.DistributedDataParallel(model, device_ids=[0])
    assert four_lines(error) and "model.module becomes model" in str(error.value)
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    with pytest.raises(UnsupportedError, match="fully_shard around a Sequential") as error:
        fully_shard(model)
    assert four_lines(error)
    with pytest.raises(UnsupportedError, match="FullyShardedDataParallel around a Sequential") as error:
        FullyShardedDataParallel(model)
    assert four_lines(error)


def test_data_parallel_is_around_the_one_device_that_there_is(model):
    x = torch.ones(4, 4, device="cuda")
    wrapped = nn.DataParallel(nn.Linear(4, 2)), nn.DataParallel(model, device_ids=[0]), nn.DataParallel(model).cuda()
    for wrapper in wrapped:
        assert next(wrapper.parameters()).is_cuda and next(iter(wrapper.state_dict())).startswith("module.")
        wrapper(x).sum().backward()
        assert torch.equal(wrapper(x), wrapper.module(x))
    assert model[0].weight.grad is not None
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        nn.DataParallel(model, device_ids=[0, 1])


@pytest.mark.parametrize("given", [{"backend": "nccl"}, {"backend": "gloo"}, {"backend": "gloo", "world_size": 4}])
def test_process_groups(given, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UnsupportedError, match="a script is one process") as error:
        dist.init_process_group(**given)
    assert four_lines(error)


def test_a_sampler_that_was_left_in_the_script(model):
    rows = torch.utils.data.TensorDataset(torch.zeros(4, 4))
    with pytest.raises(UnsupportedError, match="DistributedSampler asks a process group") as error:
        torch.utils.data.distributed.DistributedSampler(rows)
    assert four_lines(error)
    assert len(torch.utils.data.distributed.DistributedSampler(rows, num_replicas=1, rank=0)) == 4


def test_a_process_group_of_one_works_beside_the_workers(model, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1] and dist.get_world_size() == 1
        model(torch.ones(4, 4, device="cuda")).sum().backward()
        assert model[0].weight.grad.shape == (4, 4)
    finally:
        dist.destroy_process_group()


def test_an_error_ends_at_the_script_s_line(tmp_path):
    with UserScript(
        "-c", LEFT_IN_THE_SCRIPT.format(line="model = nn.parallel.DistributedDataParallel(model)"), cwd=tmp_path
    ) as script:
        assert script.wait() == 1
    assert 'File "<string>", line 6, in <module>' in script.err
    assert "Try: model  # in place of DistributedDataParallel(model); model.module becomes model" in script.err


def test_a_generator_is_not_passed_to_a_model(model):
    with pytest.raises(UnsupportedError, match=r"torch\.Generator was passed to a model"):
        model(torch.Generator())
    generator = torch.Generator(device="cuda").manual_seed(1)
    assert model(torch.randn(4, 4, generator=generator, device="cuda")).shape == (4, 2)


def test_a_model_compiled_by_torch_jit(model):
    for compiled in (
        lambda: torch.jit.script(nn.Linear(4, 2)).cuda(),
        lambda: torch.jit.script(model)(torch.ones(4, 4).cuda()),
    ):
        with pytest.raises(UnsupportedError, match=r"compiled by torch\.jit") as error:
            compiled()
        assert four_lines(error)


def test_a_model_that_goes_to_another_process(model):
    import io
    from multiprocessing.reduction import ForkingPickler

    model.share_memory()
    with pytest.raises(UnsupportedError, match="goes to another process") as error:
        ForkingPickler(io.BytesIO()).dump(model)
    assert four_lines(error)
    ForkingPickler(io.BytesIO()).dump(torch.ones(2, device="cuda"))


def test_a_lazy_module_that_drops_is_called_before_it_moves():
    def make():
        return nn.Sequential(nn.LazyLinear(3), nn.Dropout(0.5), nn.LazyLinear(2))

    with pytest.raises(UnsupportedError, match="lazy module") as error:
        make().cuda()(torch.ones(2, 4, device="cuda"))
    assert four_lines(error)
    lazy = make()
    lazy(torch.ones(2, 4))
    assert lazy.cuda()(torch.ones(2, 4, device="cuda")).shape == (2, 2)


def test_pytorch_s_own_errors_for_what_no_device_can(model):
    x = torch.ones(4, 4, device="cuda")
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        x.numpy()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + torch.ones(4, 4)
    with pytest.raises((UnsupportedError, RuntimeError)), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass
