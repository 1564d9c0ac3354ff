"""How ranks synchronise: process groups, gradient exchange, compression, outer steps. Imports torch."""
