"""Other machines: how they are named and reached, what they have to have, and what is sent to them.

Decides what a host must be like to join, and how a message to it reads. Must not know the engine, nor torch.
"""
