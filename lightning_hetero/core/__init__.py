"""Plain data: plans, clusters, models, profiles, schedules, errors. No torch in here.

Read in this order: `plan` (which ranks run which layers), `actions` (in which order), `cluster` and
`devices` (the hardware), `model_spec` and `profile` (a model's sizes and times). Import names from
these modules.
"""
