"""Facts about this machine and its processes. Importable with the standard library alone."""
