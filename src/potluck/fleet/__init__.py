"""A host and its workers: the protocol, who is in, and who computes what."""
