"""A driver that mixes traffic with faults on a real server, and checks how each request ends and what is left."""
