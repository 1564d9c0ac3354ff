"""Measure a cluster: its links, gloo over them, and each machine; the result is a profile."""
