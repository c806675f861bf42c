"""The report of a run: one self-contained HTML page, made from the files that the run wrote.

    rollout-learner report RUN_DIR [--out FILE] [--compare RUN_DIR2]
    rollout-learner report RUN_DIR --live              follow a run in the browser (`live.py`)

`read.py` turns a run's files into records. `scores.py` finds whether each prediction was right, and F1 with its
intervals. `charts.py`, `results.py`, `training.py` and `scenes.py` turn these into records of charts, tables and
pictures. `page.py` gives all of these to the jinja2 templates in `templates/`, which hold the markup. Templates escape
every value, so nothing from disk can become markup.

The report trains nothing and uses no network. The page of a run that is not finished says what is missing.
"""
