"""Page cache and block tables."""
