"""Batches and results whose rows do not lie along dim 0: how they are cut, gathered and tried."""
