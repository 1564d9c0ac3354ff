"""Inject faults into a real small training and judge the outcome: scripted scenarios, and soaks with random faults."""
