"""Lets a model with the adapters that `train_lora.py` saved answer instructions.

    python tutorials/inference_lora.py --instruction "Write a Python function `area(r)` to return the area of a circle."

The saved folder is an ordinary one of PEFT, so nothing of moreh_ap is needed to use it. `--merge FOLDER` writes a model
in which the adapters are part of the weights.
"""

import argparse

import torch
import tutorial_helpers as helpers
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

INSTRUCTIONS = (
    "Write a Python function `is_palindrome(text)` to return whether a text reads the same backwards.",
    "Implement `read_lines(path)` in Python. It should read a text file and return its lines without line endings.",
)
parser = argparse.ArgumentParser(description=__doc__, formatter_class=helpers.HelpFormatter)
parser.add_argument("--model-path", default="outputs/train_lora", help="folder of the adapters")
parser.add_argument("--merge", metavar="FOLDER", help="where to write the merged model")
parser.add_argument("--instruction", action="append", help="what to answer; may be given more than once")
parser.add_argument("--max-new-tokens", type=int, default=96, help="longest answer")
args = helpers.parse_arguments(parser)
helpers.must_exist(args.model_path, "train first: python tutorials/train_lora.py --embedded")

tokenizer = AutoTokenizer.from_pretrained(args.model_path)
model = AutoPeftModelForCausalLM.from_pretrained(args.model_path)
model.to("cuda" if torch.cuda.is_available() else "cpu")
for instruction in args.instruction or INSTRUCTIONS:
    text = helpers.answer(model, tokenizer, helpers.PROMPT.format(instruction=instruction), args.max_new_tokens)
    print(f">>> {instruction}\n{text}\n")
if args.merge:
    model.merge_and_unload().to("cpu").save_pretrained(args.merge)
    tokenizer.save_pretrained(args.merge)
    print(f"merged model saved to {args.merge}")
