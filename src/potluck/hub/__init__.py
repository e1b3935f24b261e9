"""What a run has come to, on the Hugging Face hub: a model card made from the run, and the upload."""
