"""The report of a run: one self-contained HTML page, made from the files that the run wrote.

    rollout-learner report RUN_DIR [--out FILE] [--compare RUN_DIR2]
    rollout-learner report RUN_DIR --live              follow a run in the browser (`live.py`)

`read.py` turns a run's files into records. `scores.py` finds out whether each prediction was right, and computes F1
with its intervals. `results.py`, `training.py` and `scenes.py` make charts, tables and pictures of the records.
`page.py` passes charts, tables and pictures to the jinja2 templates in `templates/`, which have the HTML. Templates
escape every value, so no text from disk is ever interpreted as HTML.

Making a report trains nothing and uses no network. If a run is not finished, its page says what is missing.
"""
