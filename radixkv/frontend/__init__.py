"""HTTP server in front of the runtime process."""
