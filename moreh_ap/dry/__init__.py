"""A script up to its first call of a model, without weights or workers: `moreh-ap plan train.py`."""
