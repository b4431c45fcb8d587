"""Drafts: guesses of the tokens that follow, which steps check."""
