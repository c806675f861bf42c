"""The logs of a run: metrics, timeline, console, trackers, the newest answers, groups of answers."""
