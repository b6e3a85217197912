"""Support for models of transformers, with or without peft adapters."""
