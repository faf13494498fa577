"""Lets a model trained by `train_llm.py` continue a text.

    python tutorials/inference_llm.py --text "### Instruction:"

The saved folder is an ordinary one, so nothing of moreh_ap is needed to use it.
"""

import argparse

import torch
import tutorial_helpers as helpers
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = ("### Instruction:\nWrite a Python function",)
parser = argparse.ArgumentParser(description=__doc__, formatter_class=helpers.HelpFormatter)
parser.add_argument("--model-path", default="outputs/train_llm/gpt2-embedded/model", help="folder of the model")
parser.add_argument("--text", action="append", help="what to continue; may be given more than once")
parser.add_argument("--max-new-tokens", type=int, default=96, help="longest answer")
args = helpers.parse_arguments(parser)
helpers.must_exist(args.model_path, "train first: python tutorials/train_llm.py --embedded")

tokenizer = AutoTokenizer.from_pretrained(args.model_path)
model = AutoModelForCausalLM.from_pretrained(args.model_path)
model.to("cuda" if torch.cuda.is_available() else "cpu")
for text in args.text or TEXTS:
    print(f">>> {text}\n{helpers.answer(model, tokenizer, text, args.max_new_tokens)}\n")
