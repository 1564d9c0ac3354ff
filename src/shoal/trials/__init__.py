"""Experiments made of the parts: one run, a demo, benches."""
