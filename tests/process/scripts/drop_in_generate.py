"""Every way to generate: greedy, sampled, beams, caches, streamers, assistants, pipelines.

With --ap it has the one line.
"""

import sys

import made_up_words
import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

import os

from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
    set_seed,
)

device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = made_up_words.tokenizer("left")
set_seed(0)
cfg = LlamaConfig(
    vocab_size=made_up_words.VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=6,
    eos_token_id=5,
    initializer_range=0.3,
)
model = LlamaForCausalLM(cfg).to(device).eval()


def step(name, f):
    try:
        r = f()
        print(name, r.tolist() if isinstance(r, torch.Tensor) else r)
    except Exception as e:
        print(name, "ERROR", type(e).__name__, str(e)[:300])


one = tokenizer("w1 w2 w3", return_tensors="pt").to(device)
many = tokenizer(made_up_words.sentences(4, 1), return_tensors="pt", padding=True).to(device)
for d in (one, many):
    d.pop("token_type_ids", None)
many = dict(many.items())
N = int(os.environ.get("ZN", 6))
step("greedy", lambda: model.generate(**one, max_new_tokens=N, do_sample=False))
step("left padded", lambda: model.generate(**many, max_new_tokens=N, do_sample=False))
step(
    "model.device inputs",
    lambda: model.generate(tokenizer("w5 w6", return_tensors="pt").input_ids.to(model.device), max_new_tokens=N),
)


def sampled(d):
    torch.manual_seed(7)
    return model.generate(**d, max_new_tokens=N, do_sample=True, top_k=20, top_p=0.9, temperature=0.8)


step("sample one", lambda: sampled(one))
step("sample many", lambda: sampled(many))
step("beam", lambda: model.generate(**many, max_new_tokens=N, num_beams=3, num_return_sequences=2, early_stopping=True))
step(
    "beam sample",
    lambda: (torch.manual_seed(1), model.generate(**one, max_new_tokens=N, num_beams=2, do_sample=True))[1],
)
step(
    "scores",
    lambda: [
        round(v, 4)
        for v in (lambda o: model.compute_transition_scores(o.sequences, o.scores, normalize_logits=True)[0].tolist())(
            model.generate(**one, max_new_tokens=N, return_dict_in_generate=True, output_scores=True)
        )
    ],
)
step("no cache", lambda: model.generate(**one, max_new_tokens=N, use_cache=False))
step("static cache", lambda: model.generate(**one, max_new_tokens=N, cache_implementation="static"))
step(
    "repetition",
    lambda: model.generate(
        **one, max_new_tokens=N, repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=3, bad_words_ids=[[9]]
    ),
)


class Stop(StoppingCriteria):
    def __call__(self, ids, scores, **kw):
        return torch.full((ids.shape[0],), ids.shape[1] >= 8, device=ids.device, dtype=torch.bool)


step("stopping", lambda: model.generate(**one, max_new_tokens=12, stopping_criteria=StoppingCriteriaList([Stop()])))


class Proc(LogitsProcessor):
    def __call__(self, ids, scores):
        scores[:, 10:50] = -float("inf")
        return scores


step("processor", lambda: model.generate(**one, max_new_tokens=N, logits_processor=LogitsProcessorList([Proc()])))


class Streamer(TextStreamer):
    def on_finalized_text(self, text, stream_end=False):
        texts.append(text)


texts = []
step(
    "streamer",
    lambda: (model.generate(**one, max_new_tokens=N, streamer=Streamer(tokenizer, skip_prompt=True)), "".join(texts))[
        1
    ],
)


def threaded():
    from threading import Thread

    s = TextIteratorStreamer(tokenizer, skip_prompt=True)
    t = Thread(target=model.generate, kwargs=dict(**one, streamer=s, max_new_tokens=N))
    t.start()
    out = "".join(s)
    t.join()
    return out


step("iterator streamer", threaded)


def assisted():
    set_seed(1)
    small = LlamaForCausalLM(LlamaConfig(**{**cfg.to_dict(), "num_hidden_layers": 1})).to(device).eval()
    return model.generate(**one, max_new_tokens=N, assistant_model=small)


step("assisted", assisted)
step("prompt lookup", lambda: model.generate(**one, max_new_tokens=N, prompt_lookup_num_tokens=2))
step("embeds", lambda: model.generate(inputs_embeds=model.get_input_embeddings()(one["input_ids"]), max_new_tokens=N))


def manual_cache():
    past, ids, out = None, one["input_ids"], []
    for _ in range(4):
        with torch.no_grad():
            o = model(ids, past_key_values=past, use_cache=True)
        past = o.past_key_values
        ids = o.logits[:, -1:].argmax(-1)
        out.append(ids.item())
    return out


step("manual cache", manual_cache)


def dyn():
    c = DynamicCache(config=model.config)
    model.generate(**one, past_key_values=c, max_new_tokens=3)
    return c.get_seq_length()


step("dynamic cache given", dyn)
step(
    "pipeline",
    lambda: pipeline("text-generation", model=model, tokenizer=tokenizer, device=0 if device == "cuda" else -1)(
        "w1 w2", max_new_tokens=4, do_sample=False
    ),
)
step(
    "pipeline batch",
    lambda: pipeline("text-generation", model=model, tokenizer=tokenizer, device=device)(
        ["w1 w2", "w3 w4 w5"], max_new_tokens=4, do_sample=False, batch_size=2, return_full_text=False
    ),
)
set_seed(0)
bert = BertForSequenceClassification(
    BertConfig(
        vocab_size=made_up_words.VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
).to(device)
step(
    "pipeline class",
    lambda: [
        f"{d['label']} {d['score']:.5f}"
        for d in pipeline("text-classification", model=bert, tokenizer=tokenizer, device=device)(
            made_up_words.sentences(3)
        )
    ],
)
step(
    "fill-mask",
    lambda: [
        f"{d['token_str']} {d['score']:.5f}"
        for d in pipeline("fill-mask", model=BertForMaskedLM(bert.config), tokenizer=tokenizer, device=device)(
            "w1 [MASK] w2"
        )
    ],
)
# train a little, then generate
opt = torch.optim.AdamW(model.parameters(), 1e-3)
model.train()
for _ in range(2):
    loss = model(**many, labels=many["input_ids"]).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(f"loss {loss.item():.5f}")
model.eval()
step("after", lambda: model.generate(**many, max_new_tokens=N, do_sample=False))
model.generation_config.max_new_tokens = 3
step("generation config", lambda: model.generate(one["input_ids"]))
