"""Fine-tunes a small ViT of transformers with the Trainer: metrics, evaluation, the best model loaded at the end.

With --ap it has the one line; prints losses and metrics.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import numpy as np
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

CLASSES = 4


class Pictures(Dataset):
    """Noise with a bright quarter, which is the class."""

    def __init__(self, count, seed):
        draws = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, CLASSES, (count,), generator=draws)
        self.pictures = torch.randn(count, 3, 32, 32, generator=draws)
        for picture, label in zip(self.pictures, self.labels):
            top, left = 16 * (label // 2), 16 * (label % 2)
            picture[:, top : top + 16, left : left + 16] += 0.5

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        return {"pixel_values": self.pictures[number], "labels": self.labels[number]}


class PrintLosses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **others):
        for name in ("loss", "grad_norm", "eval_loss", "eval_accuracy"):
            if name in logs:
                print(f"{name} {float(logs[name]):.6f}")


def compute_metrics(predictions):
    logits, labels = predictions
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


def main():
    set_seed(3)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=CLASSES,
        hidden_dropout_prob=0.1,
    )
    model = ViTForImageClassification(config)
    arguments = TrainingArguments(
        output_dir="vit",
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_train_epochs=2,
        learning_rate=2e-3,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Pictures(48, 0),
        eval_dataset=Pictures(20, 1),
        compute_metrics=compute_metrics,
        callbacks=[PrintLosses()],
    )
    trainer.train()
    metrics = trainer.evaluate()
    print(f"best: loss {metrics['eval_loss']:.6f}")


if __name__ == "__main__":
    main()
