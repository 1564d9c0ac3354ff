"""The configuration of a run: registry of sync methods, schema, presets, files. Does not import torch."""
