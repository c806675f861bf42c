"""The report of a run: one self-contained HTML page out of what the run left on disk.

    python -m learner.report RUN_DIR [--out FILE] [--compare RUN_DIR2]

`read.py` and `scenes.py` turn files into records, `scores.py` and `standings.py` give F1 and its intervals, `axes.py`
and `charts.py` draw, `pictures.py` and `gallery.py` show scenes, `headline.py`, `notes.py`,
`tables.py` and `training.py` say the rest, and `page.py` puts the page together in the clothes of `style.py`.
`markup.py` escapes by construction.
Nothing here trains, serves or reaches the network; a partial run gives a partial page that says what is missing.
"""
