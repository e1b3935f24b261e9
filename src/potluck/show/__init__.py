"""What a person sees of a run. Reads events, and needs nothing else."""
