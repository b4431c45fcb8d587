"""The HTTP client of the commands and benchmarks that talk to an OpenAI-compatible server."""
