"""Models of folders that have a configuration and no weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from moreh_ap.errors import OptionError
from moreh_ap.integrations import transformers_dry
from moreh_ap.patching import Patches

LEFT_OUT: list[str] = []


@pytest.fixture
def folder(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=50, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    patches = Patches()
    transformers_dry.install(patches, LEFT_OUT.append, without_weights=True)
    yield tmp_path
    patches.undo()


def test_a_configuration_is_enough(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, use_cache=False, attn_implementation="eager")
    assert type(model) is LlamaForCausalLM and not model.training
    assert model.dtype is torch.bfloat16 and model.config.use_cache is False
    assert LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float32).dtype is torch.float32


def test_a_folder_with_weights_is_read(folder):
    save_file(LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).state_dict(), folder / "model.safetensors")
    assert not transformers_dry.has_config_alone(folder)
    first, second = (AutoModelForCausalLM.from_pretrained(folder).lm_head.weight for _ in range(2))
    assert torch.equal(first, second)


def test_weights_that_would_be_packed_are_needed(folder):
    with pytest.raises(OptionError, match="packed"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config={"quant_method": "bitsandbytes"})


def test_a_model_on_the_cpu_generates_nothing(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([[1, 2, 3]])
    assert model.generate(prompt, max_new_tokens=4) is prompt
    assert model.generate(input_ids=prompt, max_new_tokens=4) is prompt


def test_a_model_is_not_saved(folder):
    LEFT_OUT.clear()
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder / "saved")
    assert LEFT_OUT == ["save_pretrained of a model"] and not (folder / "saved").exists()


def test_nothing_stays_changed(folder):
    before = PreTrainedModel.__dict__["from_pretrained"]
    patches = Patches()
    transformers_dry.install(patches, LEFT_OUT.append, without_weights=True)
    assert PreTrainedModel.__dict__["from_pretrained"] is not before
    patches.undo()
    assert PreTrainedModel.__dict__["from_pretrained"] is before
