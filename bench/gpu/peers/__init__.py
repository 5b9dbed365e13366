"""Libraries that a GPU may have beside ours; each runs in a process of its own."""
