"""Clusters: the machines that ranks run on, and how a process is started on each of them."""
