"""Servers that follow a run, and weight sync for TRL."""
