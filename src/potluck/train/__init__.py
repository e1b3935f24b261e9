"""What a person runs: the trainer, its engine, and what they need."""
