"""What needs a GPU, and what a machine without one says."""
