"""Calls of remote models: what is sent, what is promised, and what a script may do with the results."""
