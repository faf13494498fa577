"""Blocks that are compiled by `torch.compile`, and why some are not."""
