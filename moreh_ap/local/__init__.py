"""What the processes of one machine know of each other: cache files, running jobs, the memory they may use."""
