"""The control plane: messages, orders, channels and membership of a run's processes. Imports no torch."""
