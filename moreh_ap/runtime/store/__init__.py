"""The store through which workers of several hosts meet, over the connections of their agents."""
