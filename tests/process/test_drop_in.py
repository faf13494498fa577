"""Training scripts in the style of public examples, with and without the one line: the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from drop_in_runs import assert_same, both, num_losses
from torch import nn

from moreh_ap.session.session import Session

pytestmark = pytest.mark.rotating  # one more script each


@pytest.mark.parametrize(
    "script, losses",
    [
        ("drop_in_accelerate.py", 27),
        ("../../../tutorials/own_script.py", 14),
        ("drop_in_mnist.py", 9),
        ("drop_in_lstm.py", 11),
        ("drop_in_gan.py", 24),
        ("drop_in_vision.py", 12),
        ("drop_in_diffusion.py", 6),
        ("drop_in_rl.py", 17),
        ("drop_in_sequences.py", 16),
        ("drop_in_objects.py", 29),
        ("drop_in_penalties.py", 27),
        ("drop_in_surgery.py", 41),
        ("drop_in_second_derivatives.py", 24),
        ("drop_in_coins.py", 14),
        ("drop_in_own_parameters.py", 24),
        ("drop_in_lazy_heads.py", 20),
        ("drop_in_all_rows.py", 18),
    ],
)
def test_a_public_style_script_prints_the_numbers_of_one_device(both_in_turn, tmp_path, script, losses):
    ours, reference = both_in_turn(script, tmp_path)
    assert num_losses(reference) == losses, reference
    assert_same(ours, reference)


def test_a_script_with_trainer_prints_the_numbers_of_one_device(tmp_path):
    """Started as a user does, with the plan that is predicted to be the fastest."""
    ours, reference = both("drop_in_trainer.py", tmp_path)
    assert num_losses(reference) == 31
    assert_same(ours, reference)


def test_a_recurrent_layer_is_sharded(accelerator: Callable[[str], Session]):
    lstm, x = nn.LSTM(4, 4, batch_first=True), torch.ones(4, 3, 4)
    expected = lstm(x)[0].detach()
    accelerator("shard=2")
    lstm.cuda()
    output = lstm(x.cuda())[0]
    output.sum().backward()
    assert torch.allclose(output.cpu(), expected, atol=1e-6) and lstm.weight_ih_l0.grad is not None


def test_what_scripts_do_beside_training_gives_the_values_of_one_device(both_in_turn, tmp_path):
    ours, reference = both_in_turn("drop_in_everyday.py", tmp_path)
    assert len(reference) > 45
    assert_same(ours, reference)


def test_a_resumed_trainer_run_goes_on_with_the_losses_of_the_uninterrupted_one(both_in_turn, tmp_path):
    lines = both_in_turn.ours("drop_in_trainer.py", tmp_path, "--dropout")
    runs = {name: [line.split(" ", 1)[1] for line in lines if line.startswith(name)] for name in ("whole", "resumed")}
    last = [line for line in runs["whole"] if int(line.split()[0]) > 12 and "train_loss" not in line]
    assert len(last) > 6
    assert [line for line in runs["resumed"] if line in last] == last


# -- the random stream -------------------------------------------------------------------------------------------------


def test_the_state_of_the_random_stream_can_be_kept_and_put_back(accelerator: Callable[[str], Session], tmp_path):
    accelerator("replicate=2")
    torch.manual_seed(3)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).cuda(), torch.ones(8, 4).cuda()
    model(x)
    torch.save(torch.cuda.get_rng_state(), tmp_path / "state")
    states = torch.cuda.random.get_rng_state_all()
    first, second = model(x).cpu(), model(x).cpu()
    assert not torch.equal(first, second)
    state = torch.load(tmp_path / "state")
    assert state.dtype == torch.uint8 and type(state) is torch.Tensor
    torch.cuda.set_rng_state(state)
    assert torch.equal(model(x).cpu(), first) and torch.equal(model(x).cpu(), second)
    torch.cuda.random.set_rng_state_all(states)
    with torch.random.fork_rng():
        torch.manual_seed(9)
        assert not torch.equal(model(x).cpu(), first)
    assert torch.equal(model(x).cpu(), first), "the stream went on inside fork_rng"


def test_seeds_of_the_random_stream_are_pytorch_s(accelerator: Callable[[str], Session]):
    accelerator("replicate=2")
    for seed in (5, 2**63 + 1, -1):
        torch.manual_seed(seed)
        assert torch.cuda.initial_seed() == torch.initial_seed()
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        assert torch.cuda.initial_seed() == torch.initial_seed()
    torch.cuda.seed()
    assert torch.cuda.initial_seed() != torch.initial_seed()
    with pytest.raises(RuntimeError, match="5 bytes"):
        torch.cuda.set_rng_state(torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(TypeError, match="ByteTensor"):
        torch.cuda.set_rng_state(torch.zeros(16))
    with pytest.raises(RuntimeError, match="one device"):
        torch.cuda.get_rng_state("cuda:1")
