"""`rollout-learner recipe --only-measure`: what could training improve in this model, and by which method?

    measure.py    the command: runs the model over a sample of the data -> `Measured`, counts by scene
    exposure.py   nats after the model's own words and after the truth's
    features.py   `Measured` -> numbers by name, with intervals over scenes
    recommend.py  numbers -> a method, with its reasons

It trains nothing and needs no server: the model generates by itself (`rollout.hf`).
"""
