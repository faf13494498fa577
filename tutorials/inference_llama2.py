"""Lets a model saved by `train_llama2.py` summarise articles.

    python tutorials/inference_llama2.py --article "$(cat article.txt)"

The saved folder is an ordinary one, so nothing of moreh_ap is needed to use it.
"""

import argparse

import torch
import tutorial_helpers as helpers
from transformers import AutoModelForCausalLM, AutoTokenizer

ARTICLES = (helpers.SAMPLE_ARTICLE,)
parser = argparse.ArgumentParser(description=__doc__, formatter_class=helpers.HelpFormatter)
parser.add_argument("--model-path", default="outputs/train_llama2", help="folder of the model")
parser.add_argument("--article", action="append", help="what to summarise; may be given more than once")
parser.add_argument("--max-new-tokens", type=int, default=96, help="longest answer")
args = helpers.parse_arguments(parser)
helpers.must_exist(args.model_path, "train first: python tutorials/train_llama2.py --embedded")

tokenizer = AutoTokenizer.from_pretrained(args.model_path)
model = AutoModelForCausalLM.from_pretrained(args.model_path)
model.to("cuda" if torch.cuda.is_available() else "cpu")
for article in args.article or ARTICLES:
    text = helpers.answer(model, tokenizer, helpers.SUMMARY_PROMPT.format(article=article), args.max_new_tokens)
    print(f">>> {article}\n{text}\n")
