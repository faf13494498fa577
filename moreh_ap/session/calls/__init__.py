"""Calls of remote models: the commands sent, the promised results, and the operations a script may run on them."""
