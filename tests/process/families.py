"""Tiny models of every family, with their batches, optimizers and losses: one half of the matrix of families and plans.

Decides what each family's model looks like and how a script trains it. Must not know plans or workers.

Every model has four blocks of width 64 and four heads, two key-value heads where the family has them, no dropout, and
a vocabulary of 101, which no number of devices divides. Vectors (biases, scales of norms) start at random values: a
bias that starts at zero would hide a mistake that doubles it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matrix_own_models as own
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, HEADS, KEY_VALUE_HEADS, BLOCKS = 101, 64, 4, 2, 4
LENGTH, POSITIONS = 12, 32
STEPS = 5
ROWS = (9, 9, 9, 9, 7)
"""Rows of each step's batch: they divide evenly over no plan, and the last batch is smaller, as at an epoch's end."""
LEARNING_RATE = 1e-3

INITIALIZER_RANGE = 0.1
"""Above the families' own 0.02, with which attention is nearly uniform and a wrong mask changes next to nothing."""

Batch = dict[str, Tensor]


def _loss_of_output(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    # A key bias of attention has a gradient of zero but for rounding: with an eps of 1e-8 AdamW would walk along noise.
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-6)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _nanogpt_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return model.configure_optimizers(weight_decay=0.1, learning_rate=LEARNING_RATE)


# -- batches ---------------------------------------------------------------------------------------------------------


def lengths(step: int) -> list[int]:
    """How many tokens each row of a step's batch has: all of them in one row, one token in another."""
    return [LENGTH, 1, *((3 * row + 5 * step) % (LENGTH - 1) + 1 for row in range(2, ROWS[step]))]


def ragged_ids(step: int) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, T), padded on the right."""
    generator = torch.Generator().manual_seed(100 + step)
    ids_BT = torch.randint(3, VOCABULARY, (ROWS[step], LENGTH), generator=generator)
    mask_BT = (torch.arange(LENGTH) < torch.tensor(lengths(step))[:, None]).long()
    return ids_BT * mask_BT, mask_BT


def _causal(step: int) -> Batch:
    ids_BT, mask_BT = ragged_ids(step)
    return {"input_ids": ids_BT, "attention_mask": mask_BT, "labels": ids_BT.masked_fill(mask_BT == 0, -100)}


def _causal_left(step: int) -> Batch:
    """Padded on the left, with the positions that this needs; the first half of what is there is no target."""
    batch = {key: value.flip(1) for key, value in _causal(step).items()}
    position_BT = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    prompt_BT = position_BT < position_BT[:, -1:] // 2
    return {**batch, "labels": batch["labels"].masked_fill(prompt_BT, -100), "position_ids": position_BT}


def _classes(step: int) -> Batch:
    ids_BT, mask_BT = ragged_ids(step)
    labels_B = torch.arange(ROWS[step]) % 3
    labels_B[3] = -100
    types_BT = (torch.arange(LENGTH) >= LENGTH // 2).long().expand_as(ids_BT) * mask_BT
    return {"input_ids": ids_BT, "attention_mask": mask_BT, "token_type_ids": types_BT, "labels": labels_B}


def _sequence_to_sequence(step: int) -> Batch:
    batch = _causal(step)
    return {**batch, "labels": batch["labels"].flip(0)[:, : LENGTH - 3].contiguous()}


def _own_batch(step: int) -> Batch:
    ids_BT, mask_BT = ragged_ids(step)
    return {"ids_BT": ids_BT, "mask_BT": mask_BT, "targets_BT": ids_BT.masked_fill(mask_BT == 0, -100)}


def _nanogpt_batch(step: int) -> Batch:
    ids_BT, mask_BT = ragged_ids(step)
    targets_BT = ids_BT.masked_fill(mask_BT == 0, -1)
    return {"idx": ids_BT[:, :-1].contiguous(), "targets": targets_BT[:, 1:].contiguous()}


def _images(step: int) -> Batch:
    generator = torch.Generator().manual_seed(200 + step)
    images = torch.randn(ROWS[step], 1, 12, 12, generator=generator)
    return {"images": images, "labels": torch.randint(0, 10, (ROWS[step],), generator=generator)}


# -- how a script computes the loss ------------------------------------------------------------------------------------


def _run_own(model: nn.Module, batch: Batch) -> Tensor:
    logits_BTV = model(batch["ids_BT"], batch["mask_BT"])
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), batch["targets_BT"][:, 1:].flatten())


def _run_nanogpt(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["idx"], batch["targets"])[1]


def _run_images(model: nn.Module, batch: Batch) -> Tensor:
    return F.nll_loss(model(batch["images"]), batch["labels"])


# -- models ------------------------------------------------------------------------------------------------------------

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": INITIALIZER_RANGE,
}
_GATED = {**_DECODER, "intermediate_size": 96}
_GROUPED = {**_GATED, "num_key_value_heads": KEY_VALUE_HEADS}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2, "output_router_logits": False}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_layer": BLOCKS,
    "n_head": HEADS,
    "n_positions": POSITIONS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": INITIALIZER_RANGE,
}
_OPT = {
    **_DECODER,
    "ffn_dim": 4 * HIDDEN,
    "word_embed_proj_dim": HIDDEN,
    "dropout": 0.0,
    "init_std": INITIALIZER_RANGE,
}
_NEOX = {**_DECODER, "intermediate_size": 4 * HIDDEN}
_BERT = {
    **_DECODER,
    "intermediate_size": 4 * HIDDEN,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "d_kv": HIDDEN // HEADS,
    "d_ff": 2 * HIDDEN,
    "num_layers": BLOCKS,
    "num_decoder_layers": BLOCKS,
    "num_heads": HEADS,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}


def _of(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Returns what builds a transformers model with its family's own class of configuration."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


@dataclass(frozen=True)
class Family:
    """A kind of model and how a script trains it.

    Attributes:
        make: Builds the module; weights come from PyTorch's generator.
        batch: The batch of a step: tensors by name, on the CPU.
        run: Calls the module with a batch and gives the loss.
        optimizer: Makes the optimizer of a module.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch] = _causal
    run: Callable[[nn.Module, Batch], Tensor] = _loss_of_output
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _adamw

    def build(self, seed: int = 0) -> nn.Module:
        """A module on the CPU, the same for the same seed, its vectors at random values."""
        torch.manual_seed(seed)
        model = self.make()
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        return model.train()


FAMILIES: dict[str, Family] = {
    "gpt2": Family(_of("GPT2LMHeadModel", "GPT2Config", **_GPT2)),
    "cerebras_gpt": Family(
        _of("GPT2LMHeadModel", "GPT2Config", **_GPT2, activation_function="gelu", n_inner=4 * HIDDEN)
    ),
    "llama2": Family(_of("LlamaForCausalLM", "LlamaConfig", **_GATED)),
    "llama3": Family(_of("LlamaForCausalLM", "LlamaConfig", **_GROUPED, tie_word_embeddings=True), batch=_causal_left),
    "mistral": Family(_of("MistralForCausalLM", "MistralConfig", **_GROUPED, sliding_window=4)),
    "qwen2": Family(_of("Qwen2ForCausalLM", "Qwen2Config", **_GROUPED)),
    "qwen3": Family(_of("Qwen3ForCausalLM", "Qwen3Config", **_GROUPED, head_dim=16, tie_word_embeddings=True)),
    "opt": Family(_of("OPTForCausalLM", "OPTConfig", **_OPT)),
    "gpt_neox": Family(_of("GPTNeoXForCausalLM", "GPTNeoXConfig", **_NEOX)),
    "gemma": Family(_of("GemmaForCausalLM", "GemmaConfig", **{**_GROUPED, "num_key_value_heads": 1}, head_dim=16)),
    "phi3": Family(_of("Phi3ForCausalLM", "Phi3Config", **_GROUPED)),
    "mixtral": Family(_of("MixtralForCausalLM", "MixtralConfig", **_EXPERTS, num_local_experts=4)),
    "mixtral_balanced": Family(  # its loss has a term that looks at all tokens together
        _of("MixtralForCausalLM", "MixtralConfig", **{**_EXPERTS, "output_router_logits": True}, num_local_experts=4)
    ),
    "qwen3_moe": Family(
        _of("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_EXPERTS, head_dim=16, num_experts=4, moe_intermediate_size=32)
    ),
    "bert": Family(_of("BertForSequenceClassification", "BertConfig", **_BERT), batch=_classes),
    "t5": Family(_of("T5ForConditionalGeneration", "T5Config", **_T5), batch=_sequence_to_sequence),
    "own_transformer": Family(lambda: own.OwnTransformer(VOCABULARY), batch=_own_batch, run=_run_own, optimizer=_sgd),
    "nanogpt": Family(
        lambda: own.GPT(VOCABULARY), batch=_nanogpt_batch, run=_run_nanogpt, optimizer=_nanogpt_optimizer
    ),
    "convnet": Family(lambda: own.ConvNet(False), batch=_images, run=_run_images, optimizer=_sgd),
    "convnet_batchnorm": Family(lambda: own.ConvNet(True), batch=_images, run=_run_images, optimizer=_sgd),
}
"""By the name that the results use."""
