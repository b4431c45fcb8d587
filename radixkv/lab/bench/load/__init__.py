"""The load generator: sends sessions to a server and records times and answers."""
