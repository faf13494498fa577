"""Models on the accelerator that are traced, compiled, exported and profiled."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from one_line_models import tiny_llama
from test_one_line_training import assert_same, on_both
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from moreh_ap.errors import UnsupportedError

pytestmark = pytest.mark.rotating  # one more format each


@pytest.fixture
def model(accelerator):
    accelerator("replicate=2")
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).cuda()


def train_a_step(model, images):
    loss = model(images).square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss.item()


@pytest.mark.parametrize(
    "compiled",
    [
        lambda model, images: torch.jit.trace(model, images),
        lambda model, images: torch.jit.trace_module(model, {"forward": images}),
        lambda model, images: torch.jit.script(model),
    ],
    ids=["trace", "trace_module", "script"],
)
def test_a_compiled_copy_has_the_weights_of_now(model, compiled):
    images = torch.randn(4, 1, 6, 6).cuda()
    train_a_step(model, images)
    model.eval()
    file = io.BytesIO()
    torch.jit.save(compiled(model, images), file)
    file.seek(0)
    expected = model(images).cpu()
    train_a_step(model.train(), images)  # the model itself goes on
    assert torch.allclose(torch.jit.load(file)(images.cpu()), expected, atol=1e-6)


def test_an_exported_program_has_the_weights_of_now(model):
    images = torch.randn(4, 1, 6, 6).cuda()
    exported = torch.export.export(model.eval(), (images,))
    assert torch.allclose(exported.module()(images.cpu()), model(images).cpu(), atol=1e-6)


def test_tracing_in_training_changes_running_averages_as_on_one_device(model):
    images, alone = torch.randn(4, 1, 6, 6), copy.deepcopy(model).cpu()
    model(images.cuda()), alone(images)
    torch.jit.trace(model, images.cuda()), torch.jit.trace(alone, images)
    model(images.cuda()), alone(images)
    assert torch.allclose(model[1].running_mean.cpu(), alone[1].running_mean, atol=1e-6)
    assert model[1].num_batches_tracked.item() == alone[1].num_batches_tracked.item() > 2


def test_a_compiled_copy_is_not_trained_in_place_of_the_model(model):
    with pytest.raises(UnsupportedError, match=r"compiled by torch\.jit"):
        torch.jit.script(model)(torch.ones(4, 1, 6, 6).cuda())


def test_profilers_record_the_script_s_process(model, tmp_path):
    images = torch.randn(4, 1, 6, 6).cuda()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with (
        pytest.warns(UserWarning, match="with_stack=True is left out"),
        profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=True) as seen,
        record_function("a step"),
        torch.autograd.profiler.emit_nvtx(),
        torch.cuda.profiler.profile(),
    ):
        torch.cuda.nvtx.range_push("inside")
        train_a_step(model, images)
        torch.cuda.nvtx.range_pop()
    assert "a step" in seen.key_averages().table(sort_by="cuda_time_total")
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    with torch.autograd.profiler.profile(use_device="cuda") as seen:
        train_a_step(model, images)
    assert len(seen.function_events) > 0


def test_a_compiled_model_trains_as_on_one_device_and_each_worker_computes_its_rows(accelerator, capsys):
    """The code in workers would have been compiled for the few rows of the split check."""
    accelerator("replicate=2")

    def script(device):
        torch.manual_seed(0)
        model = tiny_llama().to(device)
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for rows in (4, 4, 3):
            ids = torch.randint(0, 50, (rows, 8)).to(device)
            loss = compiled(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *model.state_dict().values()]

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert "Every device computes the whole batch" not in capsys.readouterr().out
