"""The commands, one module each: a dataclass whose fields are its options. None imports torch by itself."""
