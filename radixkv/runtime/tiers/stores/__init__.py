"""Stores that keep pages outside the process: files, and objects on other machines."""
