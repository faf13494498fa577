"""The embedded model: a GGUF file becomes an ordinary folder with the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from embedded_model import write_gpt_config, write_model

HIDDEN, LAYERS, HEADS, FEED_FORWARD = 32, 2, 2, 64
WORDS = ["<unk>", "<s>", "</s>", *(chr(letter) for letter in range(ord("a"), ord("z") + 1)), "Ġ", "ab", "th", "the"]


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A llama of two layers with random 16-bit weights and a byte-pair vocabulary, tied embeddings."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    random = np.random.default_rng(0)
    sizes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN),
             "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FEED_FORWARD, HIDDEN), "ffn_up": (FEED_FORWARD, HIDDEN),
             "ffn_down": (HIDDEN, FEED_FORWARD), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}  # fmt: skip
    tensors = {f"blk.{layer}.{name}.weight": size for layer in range(LAYERS) for name, size in sizes.items()}
    tensors |= {"token_embd.weight": (len(WORDS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for name, size in tensors.items():
        writer.add_tensor(name, random.normal(size=size).astype(np.float16 if len(size) == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_folder_is_ordinary_and_gives_the_same_logits(gguf_file: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    num_parameters = write_model(gguf_file, folder)
    assert (folder / "model.safetensors").exists()
    plain = AutoModelForCausalLM.from_pretrained(folder)
    as_read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=gguf_file.name, dtype=torch.float32)
    assert not hasattr(plain.config, "quantization_config")
    assert plain.num_parameters() == num_parameters
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.float32}
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(plain(tokens).logits, as_read(tokens).logits, rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(folder)("the").input_ids == [WORDS.index("the")]
    plain.save_pretrained(tmp_path / "again")  # the model as read refuses this


def test_the_untrained_model_is_a_configuration_and_a_tokenizer(gguf_file: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    for name in ("model", "config"):
        (tmp_path / name).mkdir()
    write_model(gguf_file, tmp_path / "model")
    num_parameters = write_gpt_config(tmp_path / "model", tmp_path / "config")
    config, tokenizer = (kind.from_pretrained(tmp_path / "config") for kind in (AutoConfig, AutoTokenizer))
    model = AutoModelForCausalLM.from_config(config)
    assert config.model_type == "gpt2" and config.vocab_size == len(tokenizer)
    assert model.num_parameters() == num_parameters
    assert config.eos_token_id == tokenizer.eos_token_id
    assert not list((tmp_path / "config").glob("*.safetensors"))
