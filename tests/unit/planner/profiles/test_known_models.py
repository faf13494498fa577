"""The list of public models: every entry is a shape with the parameters that its makers state, and is found by name."""

from __future__ import annotations

import json
import re

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.planner.profiles.known_models import find_model, known_models, shape_from_file

STATED = {
    "Cerebras-GPT-111M": 111_050_496,
    "Llama2-7B": 6_738_415_616,
    "Llama2-13B": 13_015_864_320,
    "Llama2-70B": 68_976_648_192,
    "Llama3-8B": 8_030_261_248,
    "Llama3-70B": 70_553_706_496,
    "Llama3-405B": 405_853_388_800,
    "Mistral-7B": 7_241_732_096,
    "Mixtral-8x7B": 46_702_792_704,
    "Qwen1.5-7B": 7_721_324_544,
    "Qwen2.5-7B": 7_615_616_512,
    "Baichuan2-13B": 13_896_668_160,
    "OPT-13B": 12_853_473_280,
    "GPT-2": 124_439_808,
    "GPT-2-XL": 1_557_611_200,
    "GPT-NeoX-20B": 20_554_567_680,
    "Gemma-7B": 8_537_680_896,
    "Phi-3-mini": 3_821_079_552,
    "SmolLM2-135M": 134_515_008,
    "Qwen3-30B-A3B": 30_532_122_624,
    "DeepSeek-V3": 671_026_419_200,
    "GPT-OSS-120B": 116_829_156_672,
    "Moonlight-16B-A3B": 15_960_111_936,
    "Nemotron-3-Nano-30B-A3B": 31_577_937_344,
}
"""Elements of the published checkpoints, as their safetensors files count them."""


@pytest.mark.parametrize("name", STATED)
def test_parameters_are_those_of_the_checkpoint(name):
    assert find_model(name).shape.parameters == pytest.approx(STATED[name], rel=1e-4)


def test_every_entry_has_a_name_of_its_own_and_a_source():
    names = [alias for model in known_models() for alias in (model.name, *model.aliases)]
    assert len({name.lower() for name in names}) == len(names)
    for model in known_models():
        assert model.source.startswith("https://")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d|not fetched", model.checked), model.name
        assert model.shape.name == model.name
        for alias in model.aliases:
            assert find_model(alias) is model


def test_the_sizes_in_names_are_the_sizes():
    for model in known_models():
        size = model.name.rsplit("-", 1)[-1]
        if size[:-1].replace(".", "").isdigit() and size[-1] in "MB":
            said = float(size[:-1]) * (1e6 if size[-1] == "M" else 1e9)
            assert model.shape.parameters == pytest.approx(said, rel=0.26), model.name


def test_names_are_forgiving_and_errors_name_the_nearest():
    assert find_model("llama 3 8b").name == "Llama3-8B"
    assert find_model("LLAMA-2-13B").name == "Llama2-13B"
    with pytest.raises(OptionError, match="Llama3-8B"):
        find_model("lama3-8b")
    with pytest.raises(OptionError, match="SmolLM2-135M"):
        find_model("zzzzzz")


def test_configuration_files(tmp_path):
    config = dict(find_model("SmolLM2-135M").config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    from_folder, from_file = shape_from_file(tmp_path), shape_from_file(tmp_path / "config.json")
    assert from_folder == from_file
    assert from_folder.parameters == STATED["SmolLM2-135M"]
    assert from_folder.name == tmp_path.name


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "there is no file"), ("{", "is no JSON"), ("[1]", "holds a list"), ("{}", "no num_hidden_layers")],
)
def test_configuration_files_that_are_none(tmp_path, content, said):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(OptionError, match=said):
        shape_from_file(path)
