"""Read a run folder and explain it: summary, scaling figures, manifest, verification, report page."""
