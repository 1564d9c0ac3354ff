"""Knowing the network before a run, and understanding the error after one."""
