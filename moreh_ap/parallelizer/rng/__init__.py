"""The random numbers of a forward: which streams it draws from, and which part of what is drawn is a worker's."""
