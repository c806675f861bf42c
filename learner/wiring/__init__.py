"""Makes all parts of a run from its configuration, and passes them to the trainer."""
