"""A small model and the log of a run, for the scripts with TRL."""

import made_up_words
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification


def make_model(seed=0, labels=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=made_up_words.VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=5,
    )
    if labels:
        config.num_labels = labels
        return LlamaForSequenceClassification(config)
    return LlamaForCausalLM(config)


def show(name, trainer):
    """Prints the log of a run, without times."""
    keys = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "train_loss", "eval_loss")
    rewards = (
        "rewards/chosen",
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
        "accuracy",
        "margin",
        "reward",
        "kl",
    )
    for entry in trainer.state.log_history:
        for key in (*keys, *rewards):
            if key in entry:
                print(f"{name} {entry['step']} {key} {entry[key]:.6f}")
