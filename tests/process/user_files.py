"""What users have on disk before they start a script: small models with tokenizers, data sets."""

from __future__ import annotations

from pathlib import Path

import torch

NUM_ROWS = 24
_LETTERS = {word: at for at, word in enumerate(("<unk>", "<s>", "</s>", "▁", *map(chr, range(33, 127))))}
"""What a tokenizer of Llama's class knows: the tokens that each of them has, and letters."""


def make_files(folder: Path) -> None:
    """Writes `gpt`, `llama`, `mistral`, `instructions` and `mistral_dataset.pt` into `folder`; always the same."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        LlamaTokenizer,
        MistralConfig,
        MistralForCausalLM,
    )

    tokenizer = _byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gpt = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(tokenizer),
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=64,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        mistral = MistralForCausalLM(
            MistralConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
            )
        )
    for name, model in (("gpt", gpt), ("mistral", mistral)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    letters = LlamaTokenizer(vocab=_LETTERS, merges=[], pad_token="<unk>")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=len(letters), max_position_embeddings=64, **shape))
    llama.save_pretrained(folder / "llama")
    letters.save_pretrained(folder / "llama")
    _write_instructions(folder / "instructions")
    torch.save(_token_rows(len(tokenizer)), folder / "mistral_dataset.pt")


def _byte_tokenizer():
    """A tokenizer with one token a byte, and one for the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def _write_instructions(folder: Path) -> None:
    from datasets import Dataset

    rows = [(f"add {n} to {n}", f"print({n} + {n})\n" * (1 + n % 3)) for n in range(NUM_ROWS)]
    columns = {"instruction": [row[0] for row in rows], "output": [row[1] for row in rows]}
    folder.mkdir()
    Dataset.from_dict(columns).to_json(folder / "train.jsonl")


def _token_rows(vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Rows of 32 tokens, every one padded differently."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(NUM_ROWS):
        ids_T = torch.randint(1, vocabulary, (32,), generator=generator)
        mask_T = (torch.arange(32) < 32 - number).long()
        rows.append({"input_ids": ids_T, "attention_mask": mask_T, "labels": ids_T.masked_fill(mask_T == 0, -100)})
    return rows
