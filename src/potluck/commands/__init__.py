"""The commands: each is a dataclass whose fields are its options. None imports torch by itself."""
