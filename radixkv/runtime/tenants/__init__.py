"""Tenants: whose turn it is, and which shares of rows and pages each has."""
