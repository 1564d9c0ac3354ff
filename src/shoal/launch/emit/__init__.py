"""The same training for other people's launchers: torchrun, Slurm, Kubernetes. Pure: from a job to text."""
