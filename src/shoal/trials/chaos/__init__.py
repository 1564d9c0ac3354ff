"""Faults on purpose, with asserted outcomes: scenarios, the injecting, the watching and the judging."""
