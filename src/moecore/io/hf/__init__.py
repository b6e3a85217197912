"""Loading, export and streaming of Hugging Face weights."""
