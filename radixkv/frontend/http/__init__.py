"""HTTP layer below the routes."""
