"""A trace of training steps: what every process did when, and the file that viewers of Chrome's format show."""
