"""Contract between scheduler and device: plans and results of steps."""
