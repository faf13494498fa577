"""transformers' Trainer: accumulation over rows of unequal length, evaluation, checkpoints, the best model, resuming.

With --ap it has the one line, with --dropout random numbers in the model; prints the log, metrics, and the losses of a
run that goes on from a checkpoint.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed


class Rows(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(6, 17, (count,), generator=generator).tolist()
        self.rows = [torch.randint(0, 128, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index]}


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(), "labels": ids}


def metrics(prediction):
    guessed, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"accuracy": float((guessed == labels)[labels != -100].mean())}


class Counter(TrainerCallback):
    steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        Counter.steps += 1


def make(smoothing, epochs, folder):
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=0.2 if "--dropout" in sys.argv else 0.0,
        )
    )
    arguments = TrainingArguments(
        output_dir=folder + ("-ap" if "--ap" in sys.argv else ""),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=epochs,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=0.5,
        weight_decay=0.1,
        label_smoothing_factor=smoothing,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to=[],
        use_cpu="--ap" not in sys.argv,
        disable_tqdm=True,
    )
    assert arguments.n_gpu <= 1 and arguments.world_size == 1
    return Trainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=Rows(48, 1),
        eval_dataset=Rows(16, 2),
        compute_metrics=metrics,
        callbacks=[Counter()],
    )


def show(trainer, name):
    for entry in trainer.state.log_history:
        for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "train_loss"):
            if key in entry:
                print(f"{name} {entry['step']} {key} {entry[key]:.6f}")


trainer = make(0.0, 3, "plain")
trainer.train()
assert trainer.model_wrapped is trainer.model, "wrapped"
show(trainer, "whole")
print("steps", Counter.steps, "best", trainer.state.best_global_step)
print(f"evaluate {trainer.evaluate()['eval_loss']:.6f}")
print("predicted", trainer.predict(Rows(4, 3)).predictions.shape)
folder = trainer.args.output_dir
resumed = make(0.0, 3, "plain")
resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-12")
show(resumed, "resumed")
smooth = make(0.1, 1, "smooth")
smooth.train()
show(smooth, "smooth")
