"""The pods of a Kubernetes Job as a cluster."""
