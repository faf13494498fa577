"""What the code of a script says of its models: replaced forwards, and global variables that forwards use."""
