"""Studies of memory management that run on parts of the engine."""
