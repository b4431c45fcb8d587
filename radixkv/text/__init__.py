"""Tokenization, chat templates, stop strings."""
