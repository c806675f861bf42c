"""The records that a run writes about itself while it goes on: metrics, timeline, console, trackers, answers and
groups."""
