"""The other replicas: the index, peers, leases, and handover."""
