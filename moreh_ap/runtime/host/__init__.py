"""The supervisor of the worker processes of one machine: its program, and the controller's handle on it."""
