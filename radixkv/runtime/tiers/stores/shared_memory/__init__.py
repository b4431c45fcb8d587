"""A page store in memory that the servers of one machine map."""
