"""Tokenization and chat templates."""
