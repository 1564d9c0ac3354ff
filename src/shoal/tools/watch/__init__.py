"""`shoal watch`: a live page about a run, made from its folder only."""
