"""What other workers are told in place of those that were lost: which commands, and from which copy they go on."""
