"""What layers read and compute, on which machine, and how long a step takes."""
