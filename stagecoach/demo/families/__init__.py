"""The task families. Each module has `draw(random) -> Example`, one example at random."""
