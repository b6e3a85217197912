"""Models of transformers, and peft's adapters in them, as they are."""
