"""Shows a run to a person: reads events, and needs nothing else."""
