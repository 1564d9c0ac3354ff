"""What training costs, by arithmetic alone: sizes, collectives, step time. No I/O, no torch."""
