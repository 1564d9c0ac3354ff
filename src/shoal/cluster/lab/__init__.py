"""Emulated machines on one box: network namespaces for nodes, a bridge for the switch, shaped links between them."""
