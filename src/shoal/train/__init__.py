"""The worker process of a rank: training steps, checkpoints, resume and recovery.

Imports torch; the launcher starts it as a process and never imports it.
"""
