"""The report of a run: one self-contained HTML page, made from the files that the run wrote.

    rollout-learner report RUN_DIR [--out FILE] [--compare RUN_DIR2]
    rollout-learner report RUN_DIR --live              follow a run in the browser (`live.py`)

`read.py` turns files into records. `scores.py` finds what each prediction was, and F1 with its intervals. `charts.py`,
`results.py`, `training.py` and `scenes.py` turn these into charts, tables and pictures, still as records. `page.py`
gives all of them to the jinja2 templates in `templates/`, which hold the markup. Templates escape every value, so
nothing from disk can become markup.

The report trains nothing and uses no network. A partial run gives a partial page that says what is
missing.
"""
