"""Plain data: plans, clusters, slices, transfers, schedules, errors. No torch in here.

Read in this order: `plan` (who runs what), `actions` (in which order), `slices` and `transfers`
(who keeps and fetches which weights), `cluster` and `devices` (what there is), `model_spec` and
`profile` (what it costs). Import names from these modules.
"""
