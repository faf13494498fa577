"""Processes and messages: worker processes, one a device, and the stream of commands between them and the script.

Decides how a command reaches a worker and how its result or its error comes back. Must not know what a command does.
"""
