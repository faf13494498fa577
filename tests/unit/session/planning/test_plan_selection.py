"""What the options and what is known of a model leave of all plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.coefficients import COEFFICIENTS
from moreh_ap.planner.cost.hardware import Device, find_cluster
from moreh_ap.planner.cost.training_systems import MOREH_AP
from moreh_ap.planner.profiles.model_profile import LayerProfile, ModelProfile
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.verified_kinds import verified_kinds
from moreh_ap.session.planning.machine_profile import Machine
from moreh_ap.session.planning.model_profiling import has_items
from moreh_ap.session.planning.plan_selection import Question, constraints_of
from moreh_ap.settings import Options

LLAMA = "transformers.models.llama.modeling_llama.LlamaForCausalLM llama"
SHAPE = TransformerShape(4, 256, 768, 8, 4, 32, 2000)
PROFILE = profile_of(SHAPE, 128)
BLOCKLESS = ModelProfile("one part", 1, 8, 1, LayerProfile(), LayerProfile(parameters_replicated=100.0), LayerProfile())


def machine(cpu: bool = True) -> Machine:
    cluster = find_cluster("8xH100")
    device = Device("CPU", 2**32, 1e12, 1e11, 1e10) if cpu else cluster.device
    return Machine(replace(cluster, device=device), MOREH_AP, COEFFICIENTS, "here")


def left(profile=PROFILE, shape=SHAPE, family=LLAMA, cpu=True, **options):
    return constraints_of(Options(**options), family, profile, shape, machine(cpu))


def test_kinds_are_those_that_are_verified_for_the_family():
    assert left().kinds == verified_kinds()[LLAMA] != frozenset()
    assert left(family="nobody's").kinds == frozenset()


def test_tensor_axes_deal_whole_heads_and_need_a_known_shape():
    assert left().tensor_degrees == (1, 2, 4, 8)
    assert left(shape=replace(SHAPE, num_heads=6, num_kv_heads=6, head_dim=40)).tensor_degrees == (1, 2, 3, 6)
    assert left(shape=None).tensor_degrees == (1,)


def test_a_model_without_blocks_has_no_pipeline_and_recomputes_nothing_unless_told():
    assert left().pipeline_parallel and left().activation_recomputation == "auto"
    assert not left(BLOCKLESS, None).pipeline_parallel
    assert left(BLOCKLESS, None).activation_recomputation is False
    assert left(BLOCKLESS, None, activation_recomputation=True).activation_recomputation is True


def test_state_goes_to_host_memory_only_where_that_is_another_memory():
    assert not left(cpu=True).offload and left(cpu=False).offload


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pipeline_parallel", False),
        ("num_stages", 2),
        ("num_micro_batches", 4),
        ("activation_recomputation", False),
        ("distribute_parameter", True),
        ("mixed_precision", False),
        ("memory_usage_correction_ratio", 55),
    ],
)
def test_an_option_is_passed_on(name, value):
    assert getattr(left(**{name: value}), name) == value != getattr(left(), name)


def question(has_items: bool, root=None, **options):
    return Question(Options(**options), root or nn.Linear(2, 2), LLAMA, PROFILE, SHAPE, 64, has_items)


class Renaming(nn.Module):
    """Has a parameter whose name is no attribute, as networks that TensorDict stacks have."""

    def __init__(self):
        super().__init__()
        self._parameters["layers.weight"] = nn.Parameter(torch.ones(2))


class Aside(nn.Module):
    """Keeps layers in a list of Python."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(2, 2)]
        self.parameters_of_layers = nn.ParameterList(self.layers[0].parameters())


@pytest.mark.parametrize("kind", [Renaming, Aside])
def test_where_nothing_can_take_a_parameter_s_place_plans_have_replicas_in_float32(kind):
    candidates = search(question(False, kind()).task_on(machine())).candidates
    plans = [candidate.plan for candidate in candidates]
    assert Plan(8) in plans
    assert {(plan.replicate, plan.precision, plan.offload) for plan in plans} == {(8, "fp32", "none")}
    asked = question(False, kind(), distribute_parameter=True).task_on(machine()).constraints
    assert asked.distribute_parameter is True, "the workers say why it cannot be"


def test_a_call_with_items_is_not_planned_with_pieces_unless_the_script_asks_for_them():
    task = question(True).task_on(machine())
    assert task.constraints.num_micro_batches == 1 and not task.constraints.pipeline_parallel
    assert question(True, num_micro_batches=4).task_on(machine()).constraints.num_micro_batches == 4
    assert question(False).task_on(machine()).constraints.num_micro_batches == "auto"


def test_a_call_with_pictures_of_its_rows_or_lists_has_items():
    ids = torch.tensor([[5, 9, 9, 9, 9, 1], [5, 1, 1, 1, 1, 1], [5, 9, 9, 1, 1, 1]])
    pictures = {"input_ids": ids, "pixel_values": torch.randn(3, 3, 4, 4)}
    model = nn.Linear(2, 2)
    assert has_items((model, (), pictures), 3)
    assert not has_items((model, (), {"input_ids": ids}), 3)
    assert not has_items((model, (), {"pixel_values": pictures["pixel_values"]}), 3)
    assert has_items((model, ([torch.randn(3, 5, 4), torch.randn(3, 4, 6)],), {}), None)
