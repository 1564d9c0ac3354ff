"""ZeRO: moments, gradients and weights divided among the ranks."""
