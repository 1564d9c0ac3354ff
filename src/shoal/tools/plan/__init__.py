"""Predict a training before it runs: plans, advice, comparison with real runs, and simulation of failures."""
