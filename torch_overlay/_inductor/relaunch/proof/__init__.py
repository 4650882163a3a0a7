"""What a graph depends on, and the proof that it is nothing else."""
