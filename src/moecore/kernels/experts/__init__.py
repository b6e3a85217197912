"""The experts of one rank as one operation: contract, operation, products."""
