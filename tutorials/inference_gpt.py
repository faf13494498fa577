"""Lets a model saved by `train_gpt.py` answer instructions.

    python tutorials/inference_gpt.py --instruction "Write a Python function `area(r)` to return the area of a circle."

The saved folder is an ordinary one, so nothing of moreh_ap is needed to use it.
"""

import argparse

import torch
import tutorial_helpers as helpers
from transformers import AutoModelForCausalLM, AutoTokenizer

INSTRUCTIONS = (
    "Write a Python function `is_palindrome(text)` to return whether a text reads the same backwards.",
    "Implement `read_lines(path)` in Python. It should read a text file and return its lines without line endings.",
)
parser = argparse.ArgumentParser(description=__doc__, formatter_class=helpers.HelpFormatter)
parser.add_argument("--model-path", default="outputs/train_gpt", help="folder of the model")
parser.add_argument("--instruction", action="append", help="what to answer; may be given more than once")
parser.add_argument("--max-new-tokens", type=int, default=96, help="longest answer")
args = helpers.parse_arguments(parser)
helpers.must_exist(args.model_path, "train first: python tutorials/train_gpt.py --embedded")

tokenizer = AutoTokenizer.from_pretrained(args.model_path)
model = AutoModelForCausalLM.from_pretrained(args.model_path)
model.to("cuda" if torch.cuda.is_available() else "cpu")
for instruction in args.instruction or INSTRUCTIONS:
    text = helpers.answer(model, tokenizer, helpers.PROMPT.format(instruction=instruction), args.max_new_tokens)
    print(f">>> {instruction}\n{text}\n")
