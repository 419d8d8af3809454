"""Runs that are there, read: their records, and where two of them differ. Nothing is written."""
