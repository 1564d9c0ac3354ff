"""The configuration of a run: schema, presets, loading and saving. Torch-free."""
