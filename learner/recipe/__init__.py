"""`rollout-learner recipe`: runs a few trainings (stages) one after the other, within a given number of minutes.

    stages.py    makes each stage's configuration from the user's configuration
    stage.py     runs in a stage's process: takes over the earlier stages' labels, measures what `grpo` could gain
    record.py    `recipe.json`: the decisions so far, and what each stage gained and lost
    command.py   the command: the parent process, which starts a process for each stage

"The start" is the model that the user's configuration names. Each stage ends when its validation score no longer rises.

1. `sft` runs on the labels. First the labels are completed, if `labels.complete` estimates that this is safe. The first
   evaluation of `sft` scores the start.
2. If no labels were completed, `grpo` first measures the headroom for boxes on training samples: how much better the
   best of several sampled answers locates objects than the greedy answer does.
3. If labels were completed, `grpo` begins from the start again, with the labels that the start's answers completed. If
   no labels were completed, `grpo` begins from the best weights of `sft`, but only if there is headroom for boxes.
   Without headroom the recipe ends: `grpo` could only learn names, and rollouts do not teach names. If `sft` had ended
   for lack of time, `sft` continues before the recipe ends.

If labels are missing, but the start's answers are not sure enough to complete any, rollout matching replaces 2 and 3.
Rollout matching keeps predictions that have no label. If the boxes of rollout matching fit badly, `grpo` follows, with
the IoU of the boxes as reward.

Each stage is an ordinary run in a folder of its own, such as `OUTPUT/sft`, with its configuration next to this folder
(`OUTPUT/sft.yaml`). `OUTPUT/best` is a link to the weights with the best validation score, of all stages and the start.
If scores are equal, the earlier weights are kept. So the result never scores below the start. If validation labels are
missing, the score is `estimated_f1@0.5`. `estimated_f1@0.5` needs an estimate of the number of objects: a range from
fewest to most. All stages use the range that `sft` estimated, so their scores can be compared. If a recipe was stopped
or killed, the same command continues it.
"""
