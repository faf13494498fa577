"""What a worker does with each kind of command: a file for each file of `moreh_ap.protocol.messages`."""
