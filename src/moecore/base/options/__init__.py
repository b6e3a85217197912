"""The dataclasses of options, whose constructors check their fields."""
