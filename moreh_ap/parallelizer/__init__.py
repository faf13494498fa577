"""Everything that happens to a model inside a worker: plan, weights, forward, backward.

All of it is SPMD: every worker calls the same functions in the same order. Nothing here knows the controller, the
engine that started the worker, or the libraries that models come from.
"""
