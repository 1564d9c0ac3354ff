"""Ranks of one machine exchange through its memory instead of gloo's loopback TCP. See docs/inside.md."""
