"""The tools around a run: check the network, measure links, plan, report, explain, compare, and inject faults."""
