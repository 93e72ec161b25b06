"""Several "machines" on one: namespaces of network, mounts and processes, each with its sshd."""
