"""The tiny trained checkpoint and the trainer that made it."""
