"""What a run writes while it goes on: metrics, timeline, console, trackers, the newest answers, groups of answers."""
