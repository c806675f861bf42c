"""`rollout-learner recipe --only-measure`: says what training could improve in a model, and by which method.

    measure.py    the command: runs the model over a sample of the data -> `Measured`, counts for each scene
    exposure.py   the loss on labels after the model's own answer, compared with the loss after preceding labels
    features.py   `Measured` -> numbers by name, each with a 95% interval over scenes
    recommend.py  numbers -> a method, with its reasons

A scene is one sample: an image with its labels. The command trains nothing and needs no server: the model generates by
itself (`rollout.hf`).
"""
