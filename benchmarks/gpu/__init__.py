"""What the kernels and the cluster do on a GPU, in minutes and in one table."""
