"""Models from Hugging Face, fine-tuned on rows of text, and talked to."""
