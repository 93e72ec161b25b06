"""The cluster: router, policy, membership, front doors, client and command line."""
