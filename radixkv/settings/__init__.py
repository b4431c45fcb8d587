"""The settings of an engine and of a server: definition, flags, checks, and what other engines call them."""
