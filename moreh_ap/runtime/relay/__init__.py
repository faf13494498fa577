"""One message a host: commands go to the agent of a host, which hands them to its workers and joins their answers."""
