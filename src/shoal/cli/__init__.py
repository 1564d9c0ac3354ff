"""The command line: one function per command, grouped into modules."""
