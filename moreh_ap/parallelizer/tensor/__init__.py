"""Tensor parallelism: which layers of a model are split over the ranks of the tensor axis, and how each computes."""
