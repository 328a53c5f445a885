"""Drafting."""
