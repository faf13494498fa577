"""Trainer as people extend it: losses, callbacks, optimizers of their own, early stopping, images, resuming.

With --ap it has the one line.
"""

import math
import sys

import made_up_words
import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)


import numpy as np
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
    set_seed,
)

FOLDER = "out-ap" if "--ap" in sys.argv else "out"
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = made_up_words.tokenizer()
set_seed(0)
bc = {
    "vocab_size": made_up_words.VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}


def show(trainer, name):
    for e in trainer.state.log_history:
        print(
            name,
            {
                k: v
                for k, v in e.items()
                if k in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "train_loss", "custom")
            },
        )


class CustomTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], device=model.device))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


class LogCallback(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_local_process_zero and "loss" in logs:
            print("cb", f"{float(logs['loss']):.5f}")

    def on_epoch_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        print(
            "epoch end",
            type(model).__name__,
            round(optimizer.param_groups[0]["lr"], 8),
            round(model.classifier.weight.detach().abs().mean().item(), 5),
        )


def compute_metrics(p):
    preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
    return {"accuracy": float((np.argmax(preds, axis=1) == p.label_ids).mean())}


ds = Dataset.from_dict({"text": made_up_words.sentences(40), "label": [i % 3 for i in range(40)]}).map(
    lambda e: tokenizer(e["text"], truncation=True), batched=True
)
split = ds.train_test_split(test_size=10, seed=1)
common = {
    "per_device_train_batch_size": 5,
    "per_device_eval_batch_size": 4,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": device == "cpu",
    "logging_steps": 1,
    "seed": 3,
}
model = BertForSequenceClassification(BertConfig(**bc, num_labels=3))
args = TrainingArguments(
    f"{FOLDER}/a",
    num_train_epochs=3,
    learning_rate=2e-3,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    greater_is_better=False,
    train_sampling_strategy="group_by_length",
    save_total_limit=1,
    warmup_steps=2,
    lr_scheduler_type="cosine",
    dataloader_pin_memory=True,
    dataloader_num_workers=0,
    **common,
)
trainer = CustomTrainer(
    model=model,
    args=args,
    train_dataset=split["train"],
    eval_dataset=split["test"],
    processing_class=tokenizer,
    compute_metrics=compute_metrics,
    callbacks=[LogCallback, EarlyStoppingCallback(early_stopping_patience=1)],
)
r = trainer.train()
print("global step", r.global_step, f"{r.training_loss:.5f}")
show(trainer, "custom")
print("evaluate", {k: v for k, v in trainer.evaluate().items() if k in ("eval_loss", "eval_accuracy")})
pr = trainer.predict(split["test"])
print("predict", pr.predictions.shape, pr.metrics["test_accuracy"], pr.predictions[0].tolist())
trainer.save_model(f"{FOLDER}/saved")
trainer.save_metrics("all", r.metrics)
trainer.save_state()
back = AutoModelForSequenceClassification.from_pretrained(f"{FOLDER}/saved").to(device)
with torch.no_grad():
    print("back", back(**tokenizer("w1 w2 w3", return_tensors="pt").to(device)).logits.tolist())
# own optimizer and schedule, causal LM, neftune alpha 0 -> off, gradient checkpointing


def causal_model():
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=made_up_words.VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
        )
    )


set_seed(0)
lm = causal_model()
lm.config.use_cache = False
rows = [dict(tokenizer(s)) for s in made_up_words.sentences(24, 4)]
for r_ in rows:
    r_.pop("token_type_ids", None)
tokenizer.pad_token = tokenizer.eos_token
opt = torch.optim.AdamW(lm.parameters(), lr=4e-3)
sched = get_cosine_schedule_with_warmup(opt, 2, 8)
args = TrainingArguments(
    f"{FOLDER}/b",
    max_steps=8,
    gradient_accumulation_steps=1,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    logging_strategy="steps",
    save_strategy="no",
    **common,
)
tr = Trainer(
    lm,
    args,
    train_dataset=rows,
    eval_dataset=rows[:6],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    optimizers=(opt, sched),
)
tr.train()
show(tr, "lm")
print(f"Perplexity: {math.exp(tr.evaluate()['eval_loss']):.4f}")
# user loop with HF TrainerCallback stopping and resume
set_seed(0)


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        if state.global_step == 3:
            control.should_save = True
            control.should_training_stop = True


def fresh(out, **kw):
    set_seed(0)
    lm = causal_model()
    return Trainer(
        lm,
        TrainingArguments(out, max_steps=6, learning_rate=1e-3, save_strategy="steps", save_steps=100, **common),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        **kw,
    )


fresh(f"{FOLDER}/c", callbacks=[Stop()]).train()
t = fresh(f"{FOLDER}/c")
t.train(resume_from_checkpoint=True)
show(t, "resumed")
