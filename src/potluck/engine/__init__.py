"""The engine: computes, behind the trainer and behind your own loop."""
