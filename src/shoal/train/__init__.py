"""The worker: model, optimizer and data put together into steps.

Imports torch; the tool starts it as a process and never imports it.
"""
