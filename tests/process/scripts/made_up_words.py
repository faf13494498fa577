"""A tokenizer of made-up words and sentences of them, for scripts that must not load anything."""

import random

NUM_WORDS = 90
VOCABULARY = NUM_WORDS + 7


def tokenizer(padding_side="right", with_ends=True):
    """A sentence is put between [CLS] and [SEP] if `with_ends`, as for an encoder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>", "<s>"]
    words = [*special, *(f"w{number}" for number in range(NUM_WORDS))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if with_ends:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        eos_token="</s>",
        bos_token="<s>",
        padding_side=padding_side,
        model_max_length=32,
        model_input_names=["input_ids", "attention_mask"],
    )


def sentences(count, seed=0, shortest=3, longest=12):
    draw = random.Random(seed)
    return [
        " ".join(f"w{draw.randrange(NUM_WORDS)}" for _ in range(draw.randint(shortest, longest))) for _ in range(count)
    ]
