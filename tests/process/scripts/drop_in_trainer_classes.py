"""Trainer with a loss, callbacks and an optimizer of the user's own; early stopping, a stop by a callback, resuming.

With --ap it has the one line.
"""

import math
import sys

import made_up_words
import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)


import datasets
import numpy as np
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

FOLDER = "out-ap" if "--ap" in sys.argv else "out"
PRINTED = {"loss", "grad_norm", "learning_rate", "train_loss", "eval_loss", "eval_accuracy", "custom"}
NUM_CLASSES = 3
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = made_up_words.tokenizer()


def arguments(folder, **more):
    """Returns `more` arguments with those that all runs here have."""
    return TrainingArguments(
        f"{FOLDER}/{folder}",
        seed=3,
        logging_steps=1,
        use_cpu=device == "cpu",
        disable_tqdm=True,
        report_to="none",
        per_device_eval_batch_size=4,
        per_device_train_batch_size=5,
        **more,
    )


def printed(record):
    return {key: value for key, value in record.items() if key in PRINTED}


def print_history(title, trainer):
    for record in trainer.state.log_history:
        print(title, printed(record))


# -- classification, with a weighted loss ------------------------------------------------------------------------------


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        classes = inputs.pop("labels").view(-1)
        output = model(**inputs)
        scores = output.get("logits").view(-1, self.model.config.num_labels)
        weights = torch.tensor([float(number) for number in range(1, NUM_CLASSES + 1)], device=model.device)
        loss = torch.nn.CrossEntropyLoss(weight=weights)(scores, classes)
        if return_outputs:
            return loss, output
        return loss


class PrintingCallback(TrainerCallback):
    def on_epoch_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **others):
        rate = optimizer.param_groups[0]["lr"]
        size = model.classifier.weight.detach().abs().mean().item()
        print(f"after an epoch: {type(model).__name__} {rate:.8f} {size:.5f}")

    def on_log(self, args, state, control, logs=None, **others):
        if "loss" in logs and state.is_local_process_zero:
            print(f"logged {float(logs['loss']):.5f}")


def accuracy(evaluated):
    scores = evaluated.predictions
    if isinstance(scores, tuple):
        scores = scores[0]
    hits = np.argmax(scores, axis=1) == evaluated.label_ids
    return {"accuracy": float(hits.mean())}


def labelled_sentences():
    """Returns sentences for training and for evaluation."""
    texts = made_up_words.sentences(40)
    rows = {"label": [number % NUM_CLASSES for number in range(len(texts))], "text": texts}
    tokenized = datasets.Dataset.from_dict(rows).map(
        lambda batch: tokenizer(batch["text"], truncation=True), batched=True
    )
    parts = tokenized.train_test_split(test_size=10, seed=1)
    return parts["train"], parts["test"]


def classify_sentences():
    """Trains a small BERT until its loss no longer falls; saves it, and loads it again by an Auto class."""
    transformers.set_seed(0)
    config = transformers.BertConfig(
        num_labels=NUM_CLASSES,
        vocab_size=made_up_words.VOCABULARY,
        max_position_embeddings=64,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        attention_probs_dropout_prob=0.1,
        hidden_dropout_prob=0.1,
    )
    training, held_out = labelled_sentences()
    schedule = {"learning_rate": 2e-3, "warmup_steps": 2, "lr_scheduler_type": "cosine", "num_train_epochs": 3}
    loading = {
        "train_sampling_strategy": "group_by_length",
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": True,
    }
    saving = {
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "save_total_limit": 1,
        "greater_is_better": False,
        "metric_for_best_model": "eval_loss",
        "load_best_model_at_end": True,
    }
    trainer = WeightedTrainer(
        model=transformers.BertForSequenceClassification(config),
        args=arguments("classifier", **schedule, **loading, **saving),
        processing_class=tokenizer,
        train_dataset=training,
        eval_dataset=held_out,
        compute_metrics=accuracy,
        callbacks=[PrintingCallback, transformers.EarlyStoppingCallback(early_stopping_patience=1)],
    )
    result = trainer.train()
    print(f"ended after {result.global_step} steps, {result.training_loss:.5f}")
    print_history("weighted", trainer)
    print("evaluate", printed(trainer.evaluate()))
    predicted = trainer.predict(held_out)
    scores = predicted.predictions
    print("predicted", scores.shape, predicted.metrics["test_accuracy"], scores[0].tolist())
    saved = f"{FOLDER}/kept"
    trainer.save_model(saved)
    trainer.save_state()
    trainer.save_metrics("all", result.metrics)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(saved).to(device)
    with torch.no_grad():
        print("loaded", loaded(**tokenizer("w4 w5 w6", return_tensors="pt").to(device)).logits.tolist())


# -- language models ---------------------------------------------------------------------------------------------------


def small_gpt2():
    transformers.set_seed(0)
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": made_up_words.VOCABULARY}
    dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.1)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts))


def tokenized_sentences():
    rows = [dict(tokenizer(sentence)) for sentence in made_up_words.sentences(24, 4)]
    return [{name: row[name] for name in row if name != "token_type_ids"} for row in rows]


def train_with_own_optimizer(sentences, collator):
    """Trains with an optimizer and a schedule that are passed in, and with gradient checkpointing."""
    model = small_gpt2()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=8)
    recomputing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    when = {"max_steps": 8, "gradient_accumulation_steps": 1, "logging_strategy": "steps", "save_strategy": "no"}
    trainer = Trainer(
        model,
        arguments("language_model", **recomputing, **when),
        optimizers=(optimizer, schedule),
        data_collator=collator,
        train_dataset=sentences,
        eval_dataset=sentences[:6],
    )
    trainer.train()
    print_history("own optimizer", trainer)
    print(f"perplexity {math.exp(trainer.evaluate()['eval_loss']):.4f}")


class StopAfterThree(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        if state.global_step >= 3:
            control.should_training_stop = control.should_save = True


def stop_and_resume(sentences, collator):
    """A callback ends a run after three steps; a Trainer with a new model takes the other three."""

    def new_trainer(**more):
        model = small_gpt2()
        saving = {"save_strategy": "steps", "save_steps": 100}
        args = arguments("stopped", max_steps=6, learning_rate=1e-3, **saving)
        return Trainer(model, args, data_collator=collator, train_dataset=sentences, **more)

    new_trainer(callbacks=[StopAfterThree()]).train()
    second = new_trainer()
    second.train(resume_from_checkpoint=True)
    print_history("resumed", second)


classify_sentences()
sentences = tokenized_sentences()
tokenizer.pad_token = tokenizer.eos_token
collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
train_with_own_optimizer(sentences, collator)
stop_and_resume(sentences, collator)
