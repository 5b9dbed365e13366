"""Other implementations of the same model, each in an environment of its own."""
