"""`rollout-learner recipe`: runs `sft` on completed labels, then `grpo` or rollout matching, each stage until its score
rises no more, all within a given number of minutes.

    stages.py    makes each stage's configuration from the user's
    stage.py     runs in a stage's process: gives it the earlier stages' labels, measures what `grpo` could gain
    record.py    `recipe.json`: the decisions so far, and what each stage gained and lost
    command.py   the command: the parent process, which starts a process for each stage

1. `sft` runs on labels that are completed where `labels.complete` finds it safe, until its validation score rises no
   more. Its first evaluation scores the start: the model that the user named.
2. If no labels were completed: `grpo`, before its first step, measures on training samples how much better placed
   objects sampled answers have than greedy ones (the headroom in places).
3. `grpo`. If labels were completed, it begins from the start, whose answers completed them, with the same labels.
   Otherwise it begins from the best weights of `sft`, if there is headroom in places. If there is none, only names
   could be learned, which rollouts do not teach, and the recipe ends; if lack of time had ended `sft`, `sft` goes on
   first.
   If the start estimates that labels have gaps, but gives no answers sure enough to complete them, rollout matching
   replaces 2 and 3 and learns the objects that it finds. If boxes are loose after it, `grpo` on their IoU follows.

Each stage is an ordinary run in a folder of its own, such as `OUTPUT/sft`, with its configuration beside it
(`OUTPUT/sft.yaml`). `OUTPUT/best` is a link to the weights with the best validation score of all stages and of the
start; of equal scores, the earlier weights. Where labels of validation have gaps, the score is `estimated_f1@0.5`, for
the range of objects that `sft` saw first. So the result never scores below the start. If a recipe was stopped or
killed, the same command continues it.
"""
