"""Starting child processes, their limits and their end."""
