"""A tiny random T5 with Seq2SeqTrainer: collation of ragged rows, evaluation by generated text, `predict`.

With --ap it has the one line; prints losses and metrics.
"""

import sys
import tempfile

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import numpy as np
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 40


def examples(count):
    rows = []
    for number in range(count):
        ids = torch.randint(3, VOCABULARY, (5 + number % 3,)).tolist()
        rows.append({"input_ids": [*ids, 1], "labels": [*ids[::-1][:4], 1]})
    return rows


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    labels = [row["labels"] for row in rows]
    ids = torch.tensor(ids)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor(labels)}


def token_accuracy(prediction):
    generated, labels = prediction.predictions[:, 1:], prediction.label_ids
    width = min(generated.shape[1], labels.shape[1])
    return {"token_accuracy": float(np.mean(generated[:, :width] == labels[:, :width]))}


def main():
    torch.manual_seed(1)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.1,
            decoder_start_token_id=0,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            learning_rate=1e-2,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no",
            predict_with_generate=True,
            generation_max_length=8,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Seq2SeqTrainer(
            model=model,
            args=arguments,
            train_dataset=examples(32),
            eval_dataset=examples(16),
            data_collator=collate,
            compute_metrics=token_accuracy,
        )
        trainer.train()
        for row in trainer.state.log_history:
            if "loss" in row:
                print(f"loss {row['loss']:.6f} norm {row['grad_norm']:.4f}")
            if "eval_loss" in row:
                print(f"held out: loss {row['eval_loss']:.6f} accuracy {row['eval_token_accuracy']:.6f}")
        found = trainer.predict(examples(8), max_length=6, num_beams=2)
        print(f"predicted {found.predictions.sum()} loss {found.metrics['test_loss']:.6f}")


if __name__ == "__main__":
    main()
