"""What the runtime tells of itself: statistics, and answers about the cache."""
