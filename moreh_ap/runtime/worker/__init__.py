"""What runs inside one worker process: it executes the controller's commands in order and answers each."""
