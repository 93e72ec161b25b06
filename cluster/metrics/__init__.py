"""What the cluster has counted, for Prometheus."""
