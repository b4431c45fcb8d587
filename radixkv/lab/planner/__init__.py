"""Capacity of a GPU for a model: how many requests fit and how long they may be, without a GPU."""
