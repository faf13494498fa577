"""Observing a forward: which functions and modules it calls, at which call sites, with which numbers."""
