"""Small models whose work runs in the script's own process, where messages to workers would take longer than it."""
