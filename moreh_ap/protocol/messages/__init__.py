"""The commands that the controller sends to its workers, and what they answer.

Every command is a small frozen dataclass with explicit ids and no hidden state: the log of what was sent can be
replayed to a fresh worker. All workers receive the same commands in the same order. Tensors travel as bytes
(`TensorData`).
"""
