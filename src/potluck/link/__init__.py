"""Over what replicas talk: a process group, objects in a store, or nobody; and who holds what of which replica."""
