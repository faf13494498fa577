"""Losses over classes that workers compute in their own way, and the targets of such losses."""
