"""Optimizers of workers: steps over the local tensors of shards, and as one kernel on GPUs."""

from __future__ import annotations

import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from moreh_ap.parallelizer.mesh import Axis, Position
from moreh_ap.parallelizer.state.state_shard import StateShard
from moreh_ap.protocol.messages.optimizers import BuildOptimizer
from moreh_ap.protocol.messages.tensors import StateRef, TensorData
from moreh_ap.runtime.worker.worker_device import WorkerDevice
from moreh_ap.runtime.worker.worker_optimizer import WorkerOptimizer, fuse_where_possible
from moreh_ap.session.models.known_optimizers import elementwise_optimizers

SHAPES = [(5, 3), (1, 4), (6,), (2, 3)]
"""Of the whole parameters: the second worker has less of the first, and nothing of the second."""


@pytest.fixture(params=[0, 1], ids=["first worker", "second worker"])
def mesh(request):
    """Two workers, of which this process is one; the other is not there, and nothing asks for it."""
    dist.init_process_group("fake", rank=request.param, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=(f"of_worker_{request.param}",))  # equal ones share a cache
    dist.destroy_process_group()


def whole(number, seed=0):
    return torch.randn(SHAPES[number], generator=torch.Generator().manual_seed(10 * seed + number))


def part(full):
    """Returns what this worker has of a tensor."""
    start = dist.get_rank() * -(-len(full) // 2)
    return full[start : start + -(-len(full) // 2)].clone()


def shard(full, mesh):
    return DTensor.from_local(part(full), mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


def parameters(mesh):
    return [nn.Parameter(shard(whole(number), mesh)) for number in range(len(SHAPES))]


def on_worker(shards, kind, **defaults):
    axis = Axis(dist.get_rank(), 2, None)
    position = Position(*[axis] * 5)
    refs = tuple(StateRef("model0", "param", str(number)) for number in range(len(shards)))
    command = BuildOptimizer("optimizer0", pickle.dumps(kind), (refs,), defaults)
    held = [[StateShard(one, position) for one in shards]]
    return WorkerOptimizer(command, held, WorkerDevice(dist.get_rank(), 2, "cpu"))


def give_gradients(shards, mesh, step, scale=1.0):
    for number, one in enumerate(shards):
        without = step == 1 and number == 3
        one.grad = None if without else shard(whole(number, seed=step + 1) * scale, mesh)


@pytest.mark.parametrize("kind", elementwise_optimizers(), ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_a_step_is_that_of_the_whole(mesh, kind):
    """Weights and state are this worker's part, with a parameter that has no gradient in one step."""
    shards, wholes = parameters(mesh), [nn.Parameter(whole(number)) for number in range(len(SHAPES))]
    optimizer, reference = on_worker(shards, kind, lr=0.01), kind(wholes, lr=0.01)
    for step in range(4):
        give_gradients(shards, mesh, step)
        for number, one in enumerate(wholes):
            one.grad = None if shards[number].grad is None else whole(number, seed=step + 1)
        optimizer.step({0: {"lr": 0.01 / (step + 1)}}, {})
        reference.param_groups[0]["lr"] = 0.01 / (step + 1)
        reference.step()
    described = optimizer.describe()
    laid_out = []
    for number, (one, other) in enumerate(zip(shards, wholes)):
        torch.testing.assert_close(one.detach().to_local(), part(other.detach()), rtol=1e-6, atol=1e-7)
        assert set(described.get(number, ())) == set(reference.state[other])
        for key, value in reference.state[other].items():
            if isinstance(value, torch.Tensor) and value.shape == other.shape:
                found = optimizer.state(number, key)
                assert described[number][key].shape == found.shape == SHAPES[number]
                assert isinstance(found.tensor, DTensor) and found.tensor.placements == one.placements
                torch.testing.assert_close(found.local, part(value), rtol=1e-6, atol=1e-7)
                laid_out.append((number, key))
            elif value is not None:
                assert described[number][key] == value
    assert [(number, key) for number, key, *_ in optimizer.states()] == laid_out


@pytest.mark.parametrize(
    ("kind", "how"), [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {}), (torch.optim.AdamW, {})]
)
def test_a_fused_step_knows_shards(mesh, kind, how):
    """One kernel for all, which divides gradients by their scale and skips itself, as `GradScaler` wants it."""
    shards = parameters(mesh)
    plain = [nn.Parameter(part(whole(number))) for number in range(len(SHAPES))]
    optimizer = on_worker(shards, kind, lr=0.1, fused=True, **how)
    reference = kind(plain, lr=0.1, fused=True, **how)
    for step, found in enumerate([0.0, 0.0, 1.0, 0.0], start=2):
        scaling = {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(found)}
        for number, one in enumerate(plain):
            one.grad = part(whole(number, seed=step + 1) * 8.0)
        give_gradients(shards, mesh, step, 8.0)
        optimizer.step({}, scaling)
        vars(reference).update(scaling)
        reference.step()
    assert all(torch.equal(one.to_local(), other) for one, other in zip(shards, plain))
    assert not torch.equal(plain[0], part(whole(0)))


def test_a_shard_in_other_memory_is_stepped_there(mesh):
    """FSDP2 may give a parameter other memory; and gradients are freed by whoever clears them."""
    shards = parameters(mesh)
    optimizer = on_worker(shards, torch.optim.SGD, lr=1.0)
    give_gradients(shards, mesh, 0)
    optimizer.step({}, {})
    memory = shards[0].detach().to_local()
    expected = memory - shards[0].grad.to_local()
    shards[0]._local_tensor = memory.clone()
    optimizer.step({}, {})
    assert torch.equal(shards[0].detach().to_local(), expected) and not torch.equal(memory, expected)
    freed = weakref.ref(shards[0].grad.to_local().untyped_storage())
    local = weakref.ref(shards[0].grad._local_tensor)
    for one in shards:
        one.grad = None
    assert local() is None and freed() is None


def test_what_is_written_into_state_is_stepped_with(mesh):
    shards = parameters(mesh)
    optimizer = on_worker(shards, torch.optim.SGD, lr=1.0, momentum=0.5)
    give_gradients(shards, mesh, 0)
    optimizer.step({}, {})
    before = shards[0].detach().to_local().clone()
    optimizer.state(0, "momentum_buffer").write(torch.ones(SHAPES[0]))
    with torch.no_grad():
        optimizer.state(0, "momentum_buffer").tensor.mul_(4.0)
    optimizer.step({}, {})
    gradient = shards[0].grad.to_local()
    assert torch.equal(shards[0].detach().to_local(), before - (part(torch.full(SHAPES[0], 2.0)) + gradient))


def test_state_moves_between_processes_and_plans(mesh):
    """What is loaded or taken over, whole or as it was held, is what the next step begins with."""
    shards = parameters(mesh)
    optimizer = on_worker(shards, torch.optim.AdamW, lr=0.1)
    give_gradients(shards, mesh, 0)
    optimizer.step({}, {})
    state = {
        number: {"step": torch.tensor(1.0), **{key: whole(number, seed=7).abs() for key in ("exp_avg", "exp_avg_sq")}}
        for number in range(len(SHAPES))
    }
    encoded = {
        number: {key: TensorData.of(value, on_device=False) for key, value in entries.items()}
        for number, entries in state.items()
    }
    optimizer.load(encoded, kept={})
    others = [parameters(mesh) for _ in range(2)]
    for copy in others:
        for one, other in zip(shards, copy):
            with torch.no_grad():
                other.copy_(one)
    kept, moved = (on_worker(copy, torch.optim.AdamW, lr=0.5) for copy in others)
    held = pickle.loads(pickle.dumps(optimizer.held()))
    assert not any(isinstance(value, DTensor) for entries in held["states"] for value in entries.values())
    kept.put_back(held)
    moved.take_over(held, state)
    for one, own in zip((optimizer, kept, moved), (shards, *others)):
        give_gradients(own, mesh, 1)
        one.step({}, {})
    assert torch.equal(
        optimizer.state(0, "exp_avg").local, part(whole(0, seed=7).abs()).lerp(part(whole(0, seed=2)), 0.1)
    )
    for copy in others:
        assert all(torch.equal(one.to_local(), other.to_local()) for one, other in zip(shards, copy))


def test_a_parameter_that_is_listed_twice_has_one_state(mesh):
    first, *_ = parameters(mesh)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = on_worker([first, first], torch.optim.SGD, lr=0.1, momentum=0.9)
    give_gradients([first], mesh, 0)
    optimizer.step({}, {})
    local = [optimizer.state(number, "momentum_buffer").local for number in range(2)]
    assert local[0].data_ptr() == local[1].data_ptr()


def _steps(optimizer, parameter):
    for number in range(3):
        parameter.grad = torch.linspace(-1.0, 1.0, 32) * (number + 1)
        optimizer.step()
    return parameter.detach().clone()


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_step_gives_the_same_weights(cls):
    def built():
        parameter = nn.Parameter(torch.linspace(1.0, 2.0, 32))
        return cls([parameter], lr=0.1, amsgrad=True), parameter

    (plain, first), (fused, second) = built(), built()
    fuse_where_possible(fused)
    assert fused.param_groups[0]["fused"] is True and plain.param_groups[0]["fused"] is None
    torch.testing.assert_close(_steps(fused, second), _steps(plain, first), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("said", [{"fused": False}, {"foreach": True}, {"capturable": True}, {"differentiable": True}])
def test_what_the_script_has_said_stays(said):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], **said)
    before = dict(optimizer.param_groups[0])
    fuse_where_possible(optimizer)
    assert optimizer.param_groups[0] == before


def test_other_classes_stay_as_they_are():
    class Own(torch.optim.AdamW):
        """Steps in a way of its own."""

    for cls in (Own, torch.optim.SGD):
        optimizer = cls([nn.Parameter(torch.ones(2))])
        fuse_where_possible(optimizer)
        assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("said", [{}, {"foreach": True}])
def test_the_values_of_the_first_step_leave_it_fused(mesh, said):
    """They are those of the script's groups: `fused` is None among them where the script has said nothing."""
    shards = parameters(mesh)
    optimizer = on_worker(shards, torch.optim.AdamW)
    optimizer._fuses = True  # as on a GPU
    sent = {**torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.5, **said).param_groups[0]}
    del sent["params"]
    give_gradients(shards, mesh, 0)
    optimizer.step({0: sent}, {})
    (group,) = optimizer._optimizer.param_groups
    assert group["lr"] == 0.5 and group["fused"] is (None if said else True)
    give_gradients(shards, mesh, 1)
    optimizer.step({0: {"lr": 0.25}}, {})
    assert group["lr"] == 0.25 and group["fused"] is (None if said else True)
