"""Check machines and network before a run: collect facts on every node, judge them, prove the result with gloo."""
