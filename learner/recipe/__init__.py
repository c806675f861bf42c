"""`rollout-learner recipe`: `sft` on completed labels, then `grpo` or rollout matching, each as long as it pays, within
a given time.

    stages.py    the user's configuration -> each stage's
    stage.py     a stage's process: what it begins with, and what sampled answers could still gain in places
    record.py    `recipe.json`: what was decided, and what each stage gained and lost
    command.py   the command, the parent of these processes

1. `sft` on labels that are completed where `labels.complete` finds it safe, until its validation score rises no more.
   Its first evaluation measures the start.
2. If nothing was completed: from its best weights, the headroom in places is measured on training samples.
3. `grpo`. If labels were completed, it begins from the start, whose answers completed them, with the same labels.
   Otherwise from the best weights of `sft`, if there is headroom in places and K answers differ; if not, only names are
   left, which rollouts do not teach, and the recipe ends; if `sft` had ended for lack of time, it goes on first.
   If labels have gaps by the estimate of the start, and nothing that it says is sure enough to complete them,
   rollout matching that keeps what it finds takes the place of 2 and 3. If boxes are loose, `grpo` on their IoU
   follows.

Each stage is an ordinary run in a folder of its own, such as `OUTPUT/sft`, with its configuration beside it
(`OUTPUT/sft.yaml`). `OUTPUT/best` is a link to the weights with the best validation score of all, those of the start
included, of equal ones the earlier. Where labels of validation have gaps, the score is `estimated_f1@0.5`, for the
range of objects that `sft` saw first. So the recipe never gives less than it began with, by that score. A second
command goes on where the first one ended, however that was.
"""
