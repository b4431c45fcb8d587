"""Choice of the requests that each step computes."""
