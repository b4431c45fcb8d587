"""What the processes say to each other."""
