"""T5 and BART: loops and Seq2SeqTrainer, with beams in the evaluation.

With --ap it has the one line.
"""

import sys

import made_up_words
import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

import numpy as np
from torch.utils.data import DataLoader
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    get_scheduler,
    set_seed,
)

tokenizer = made_up_words.tokenizer()
FOLDER = "out-ap" if "--ap" in sys.argv else "out"
device = "cuda" if torch.cuda.is_available() else "cpu"
set_seed(0)


def t5():
    set_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=made_up_words.VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.1,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=5,
        )
    )


model = t5().to(device)
src, tgt = made_up_words.sentences(24, 1), made_up_words.sentences(24, 2, 3, 6)
rows = tokenizer(src, max_length=16, truncation=True)
labels = tokenizer(text_target=tgt, max_length=8, truncation=True)["input_ids"]
rows = [
    {"input_ids": ids, "attention_mask": mask, "labels": label}
    for ids, mask, label in zip(rows["input_ids"], rows["attention_mask"], labels)
]
collator = DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100, pad_to_multiple_of=8)
train_dl = DataLoader(rows[:16], shuffle=True, collate_fn=collator, batch_size=4)
eval_dl = DataLoader(rows[16:], collate_fn=collator, batch_size=4)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
sched = get_scheduler("linear", opt, 1, 8)
for _epoch in range(2):
    model.train()
    for batch in train_dl:
        batch = {k: v.to(device) for k, v in batch.items()}
        out = model(**batch)
        out.loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
        print(f"t5 loss {out.loss.item():.6f}")
    model.eval()
    for batch in eval_dl:
        with torch.no_grad():
            gen = model.generate(
                batch["input_ids"].to(device),
                attention_mask=batch["attention_mask"].to(device),
                max_length=10,
                num_beams=3,
            )
            gen = gen.cpu().numpy()
            lab = batch["labels"].numpy()
            lab = np.where(lab != -100, lab, tokenizer.pad_token_id)
        if isinstance(gen, tuple):
            gen = gen[0]
        print(
            "gen",
            tokenizer.batch_decode(gen, skip_special_tokens=True),
            len(tokenizer.batch_decode(lab, skip_special_tokens=True)),
        )
# bart
set_seed(0)
bart = BartForConditionalGeneration(
    BartConfig(
        vocab_size=made_up_words.VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=6,
        eos_token_id=5,
        decoder_start_token_id=5,
        forced_eos_token_id=5,
    )
).to(device)
opt = torch.optim.AdamW(bart.parameters(), lr=3e-3)
col = DataCollatorForSeq2Seq(tokenizer, model=bart)
for batch in DataLoader(rows[:12], collate_fn=col, batch_size=5):
    batch = batch.to(device)
    out = bart(
        **batch,
    )
    out.loss.backward()
    opt.step()
    opt.zero_grad()
    print(f"bart loss {out.loss.item():.6f}")
bart.eval()
print(
    "bart gen",
    bart.generate(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=8,
        num_beams=4,
        early_stopping=True,
        no_repeat_ngram_size=2,
        length_penalty=2.0,
    ).tolist(),
)


# Seq2SeqTrainer
def compute_metrics(eval_preds):
    preds, labels = eval_preds
    if isinstance(preds, tuple):
        preds = preds[0]
    preds = np.where(preds != -100, preds, 0)
    labels = np.where(labels != -100, labels, 0)
    d = tokenizer.batch_decode(preds, skip_special_tokens=True)
    return {"gen_len": float(np.mean([np.count_nonzero(p != 0) for p in preds])), "chars": float(sum(map(len, d)))}


set_seed(0)
args = Seq2SeqTrainingArguments(
    FOLDER,
    eval_strategy="epoch",
    learning_rate=3e-3,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    num_train_epochs=2,
    predict_with_generate=True,
    generation_max_length=8,
    generation_num_beams=2,
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
    save_total_limit=1,
    save_strategy="no",
    bf16=False,
    use_cpu=device == "cpu",
)
m = t5()
trainer = Seq2SeqTrainer(
    m,
    args,
    train_dataset=rows[:16],
    eval_dataset=rows[16:],
    processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=m),
    compute_metrics=compute_metrics,
)
trainer.train()
for e in trainer.state.log_history:
    print(
        {
            k: v
            for k, v in e.items()
            if k in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_gen_len", "eval_chars", "train_loss")
        }
    )
p = trainer.predict(rows[:5], max_length=6, num_beams=1)
print("predict", p.predictions.tolist(), round(p.metrics["test_loss"], 5))
