"""Emulated machines on one host: a network namespace for each node, a bridge for the switch, shaped links."""
