"""A rank's part in membership: it enters the generations its agent tells it to, frees itself from those that are over,
and commits only while its agent says that its generation is the newest. `docs/faults.md` has the whole of it.
"""
