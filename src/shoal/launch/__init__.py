"""From a plan to running ranks, and from their end to a verdict."""
