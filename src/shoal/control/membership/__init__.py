"""Who takes part in a run, decided by all of its agents and by none in particular. Pure but for `promisefile`.

`council` decides, `docs/faults.md` says what it promises.
"""
