"""Masked language modelling with Trainer: a tiny random BERT, a tokenizer of words, masks drawn by the collator.

With --ap it has the one line; prints losses and the perplexity.
"""

import math
import sys
import tempfile

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from datasets import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

WORDS = ["a", "the", "red", "blue", "cat", "dog", "bird", "sings"]
WORDS += ["runs", "sleeps", "quickly", "slowly", "today", "here", "there"]


def main():
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
        tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(vocabulary)})
        draws = torch.randint(0, len(WORDS), (64, 9)).tolist()
        texts = [" ".join(WORDS[word] for word in draw[: 5 + number % 5]) for number, draw in enumerate(draws)]
        data = Dataset.from_dict({"text": texts})
        data = data.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True, remove_columns=["text"])
        model = BertForMaskedLM(
            BertConfig(
                vocab_size=len(vocabulary),
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                max_position_embeddings=32,
            )
        )
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=3,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=data.select(range(48)),
            eval_dataset=data.select(range(48, 64)),
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3),
        )
        trainer.train()
        for row in trainer.state.log_history:
            if "loss" in row:
                print(f"loss {row['loss']:.6f} norm {row['grad_norm']:.4f}")
        loss = trainer.evaluate()["eval_loss"]
        print(f"held out: loss {loss:.6f} perplexity {math.exp(loss):.4f}")


if __name__ == "__main__":
    main()
