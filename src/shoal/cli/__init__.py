"""The command line: one function per verb, grouped into modules."""
