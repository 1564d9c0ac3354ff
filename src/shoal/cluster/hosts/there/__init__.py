"""Programs that run on a host, with nothing but the standard library of the Python that is there.

`look` and `put` travel as text before anything of shoal is there; `env` is run from the copy of shoal that they made.
"""
