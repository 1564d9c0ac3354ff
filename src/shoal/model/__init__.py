"""The GPT model and its CPU kernels."""
