"""Who may use the cluster: keys, tenants and their quotas, TLS, and what is refused."""
