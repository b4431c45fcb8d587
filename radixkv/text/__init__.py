"""Tokenisation, chat templates, stop strings."""
