"""The way from a configuration to a run: every part is made here, and passed to the trainer."""
