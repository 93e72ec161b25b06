"""Several "machines" on one: namespaces of network, mounts, processes and names, each with its sshd."""
