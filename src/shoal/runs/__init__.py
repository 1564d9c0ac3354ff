"""Runs from outside: start, follow, stop and resume them, and let other machines join."""
