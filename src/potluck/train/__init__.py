"""The trainer, its data, its recipes and its model."""
