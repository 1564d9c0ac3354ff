"""Explains error messages of PyTorch, gloo, NCCL, torchrun, SSH and the system: cause and fix."""
