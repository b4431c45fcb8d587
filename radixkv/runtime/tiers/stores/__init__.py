"""Tiers behind the device's pages."""
