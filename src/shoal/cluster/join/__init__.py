"""Machines that join by themselves: no SSH, one line to type on each."""
