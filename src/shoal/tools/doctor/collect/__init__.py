"""The program that doctor runs on every node. It uses only the standard library: the node may have nothing else."""
