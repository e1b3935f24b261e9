"""What computes: the engine behind the trainer and behind your own loop."""
