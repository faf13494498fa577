"""Forwards on some items of a batch: results that have an entry for each item, and numbers of the whole batch."""
