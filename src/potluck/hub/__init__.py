"""The Hugging Face hub: a model card made from a run, and the upload of its result."""
