"""Clusters that start hosts: what a Slurm or Kubernetes job says of them, and how one is asked for."""
