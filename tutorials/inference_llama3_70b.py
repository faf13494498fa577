#!/usr/bin/env python
"""Lets a model saved by `train_llama3_70b.py` summarise articles.

The saved folder is an ordinary one, so nothing of moreh_ap is needed to use it:

    python tutorials/inference_llama3_70b.py --article "$(cat article.txt)"
"""

from tutorial_data import SAMPLE_ARTICLE, summary_prompt
from tutorial_evaluation import answer_all

if __name__ == "__main__":
    answer_all(__doc__, "train_llama3_70b", "article", (SAMPLE_ARTICLE,), summary_prompt)
