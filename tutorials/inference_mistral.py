"""Lets a model saved by `train_mistral.py` answer instructions.

    python tutorials/inference_mistral.py --instruction "Write a Python function `mean(values)` that returns the mean."

The saved folder is an ordinary one, so nothing of moreh_ap is needed to use it.
"""

import argparse

import torch
import tutorial_helpers as helpers
from transformers import AutoModelForCausalLM, AutoTokenizer

INSTRUCTIONS = (
    "Write a Python function `largest(numbers)` to return the largest of a list of numbers.",
    "Implement `count_words(text)` in Python. It should count how often each word occurs in a text.",
)
parser = argparse.ArgumentParser(description=__doc__, formatter_class=helpers.HelpFormatter)
parser.add_argument("--model-path", default="outputs/train_mistral", help="folder of the model")
parser.add_argument("--instruction", action="append", help="what to answer; may be given more than once")
parser.add_argument("--max-new-tokens", type=int, default=96, help="longest answer")
args = helpers.parse_arguments(parser)
helpers.must_exist(args.model_path, "train first: python tutorials/train_mistral.py --embedded")

tokenizer = AutoTokenizer.from_pretrained(args.model_path)
model = AutoModelForCausalLM.from_pretrained(args.model_path)
model.to("cuda" if torch.cuda.is_available() else "cpu")
for instruction in args.instruction or INSTRUCTIONS:
    text = helpers.answer(model, tokenizer, helpers.PROMPT.format(instruction=instruction), args.max_new_tokens)
    print(f">>> {instruction}\n{text}\n")
