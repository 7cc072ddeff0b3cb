"""The inside of a worker: a run with its engine, what is done to it between two steps, and what is asked of it."""
