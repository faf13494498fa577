"""Prepares what `train_mistral.py` reads: the model as a folder, and the data set as tokens.

From the root of the repository:

    python tutorials/prepare_mistral.py             # from the hub: ./mistral-7b and mistral_dataset.pt
    python tutorials/prepare_mistral.py --embedded  # without a hub: outputs/mistral-135m, outputs/mistral_dataset.pt

`--embedded` makes a Mistral of the prepared SmolLM2, which is a Llama. A Mistral whose attention sees all positions
computes what a Llama does, parameter by parameter; the script compares the logits of both before it saves anything.
"""

import argparse
import sys
from pathlib import Path

import torch
import tutorial_helpers as helpers
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

SAME = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range",
        "rms_norm_eps", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings",
        "rope_parameters", "attention_dropout")  # fmt: skip


@torch.no_grad()
def as_mistral(llama) -> MistralForCausalLM:
    """Returns a Mistral with the weights of a Llama.

    Raises:
        SystemExit: The two do not give the same logits: the Llama has something that no Mistral has, such as biases.
    """
    settings = {name: getattr(llama.config, name) for name in SAME}
    mistral = MistralForCausalLM(MistralConfig(**settings, sliding_window=None))
    missing, unexpected = mistral.load_state_dict(llama.state_dict(), strict=False)
    tokens = torch.arange(64).reshape(2, 32) % llama.config.vocab_size
    difference = (mistral.eval()(tokens).logits - llama.eval()(tokens).logits).abs().max().item()
    if missing or unexpected or difference > 0:
        raise SystemExit(f"not the same model: {missing=}, {unexpected=}, largest difference of a logit {difference}")
    print("as a Mistral: all logits of 2 x 32 tokens equal those of the Llama")
    return mistral


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=helpers.HelpFormatter)
    parser.add_argument("--embedded", action="store_true", help="what scripts/prepare_tutorial.py prepared, no hub")
    parser.add_argument("--model", default="mistralai/Mistral-7B-v0.1", help="hub name or folder")
    parser.add_argument("--dataset", default="iamtarun/python_code_instructions_18k_alpaca", help="hub name or folder")
    parser.add_argument("--block-size", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--model-path", type=Path, default="mistral-7b", help="where the model goes")
    parser.add_argument("--dataset-path", type=Path, default="mistral_dataset.pt", help="where the tokens go")
    if "--embedded" in sys.argv:
        parser.set_defaults(model="smollm2-135m-instruct", dataset="python-functions", block_size=96)
        parser.set_defaults(model_path="outputs/mistral-135m", dataset_path="outputs/mistral_dataset.pt")
    args = helpers.parse_arguments(parser)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if model.config.model_type == "llama":
        model = as_mistral(model)
    model.save_pretrained(args.model_path)
    tokenizer.save_pretrained(args.model_path)
    print(f"model: {model.num_parameters():,} parameters in {args.model_path}")

    rows = helpers.load_rows(args.dataset, ("instruction", "output"))
    rows = helpers.tokenize(rows, helpers.instruction_tokens, tokenizer, args.block_size)
    args.dataset_path.parent.mkdir(parents=True, exist_ok=True)
    for part, path in (("train", args.dataset_path), ("test", args.dataset_path.with_suffix(".test.pt"))):
        columns = {name: rows[part][name][:] for name in ("input_ids", "attention_mask")}
        # A row's tensors are views of the columns, and torch.save writes a tensor with its views once.
        torch.save([dict(zip(columns, row)) for row in zip(*columns.values())], path)
        print(f"data set: {len(rows[part])} rows of {args.block_size} tokens in {path}")


if __name__ == "__main__":
    main()
