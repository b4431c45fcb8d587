"""Reading of checkpoint weights."""
