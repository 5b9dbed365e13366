"""The trainer of the checkpoint in `models/tiny`."""
