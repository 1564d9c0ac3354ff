"""The nodes of a Slurm allocation as a cluster: agents are started by srun, over one file system."""
