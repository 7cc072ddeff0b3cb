"""What a run keeps on disk: save points, weights-only checkpoints, what it goes on from, what is swept away."""
