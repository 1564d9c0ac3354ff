"""Agree on which nodes train: Paxos over generations, with resignations, forks and leases (see docs/faults.md)."""
