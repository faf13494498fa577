"""Words, a tokenizer of them and a small model, for the scripts with TRL."""

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(92)]


def make_tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )


def make_model(seed=0, labels=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    if labels:
        config.num_labels = labels
        return LlamaForSequenceClassification(config)
    return LlamaForCausalLM(config)


def sentences(seed, count, shortest=3, longest=12):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(shortest, longest))) for _ in range(count)]


def show(name, trainer):
    """Prints the log of a run, without times."""
    keys = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "train_loss", "eval_loss")
    rewards = ("rewards/chosen", "rewards/margins", "rewards/accuracies", "logps/chosen", "accuracy", "margin")
    for entry in trainer.state.log_history:
        for key in (*keys, *rewards):
            if key in entry:
                print(f"{name} {entry['step']} {key} {entry[key]:.6f}")
