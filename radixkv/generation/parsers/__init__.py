"""Calls of tools and reasoning in the text that a model writes."""
